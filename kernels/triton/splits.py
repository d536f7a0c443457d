"""The kernels of paged attention: one program for one split of a region, a row and a kv head."""

from __future__ import annotations

import triton.language as tl

from kernels.triton.jit import jit, jit_varying
from kernels.triton.tiles import (
    AS_STORED,
    CHUNK,
    chunk_channels,
    find_slots,
    join_parts,
    load_chunk,
    split_parts,
    visible_slots,
)

# Weights are kept 2^15 times larger than exp(score - largest): in fp16 the small ones then lose
# nothing, and the largest one, 32768, still fits.
LIFT = tl.constexpr(15.0)


@jit
def query_scores(
    q: tl.tensor,
    center: tl.tensor,
    spread: tl.tensor,
    data: tl.tensor,
    at: tl.tensor,
    ranges: tl.tensor,
    ranges_at: tl.tensor,
    seen: tl.tensor,
    group: tl.tensor,
    scale: tl.tensor,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
) -> tl.tensor:
    """scale * q . k of a kv head's query group and a split's slots: [MEMBERS, slots] fp32.

    q points to the group's queries, center and spread to the sequence's and head's statistics,
    at and ranges_at to the slots' keys. With codes c of a group of channels,
    q . (c * scale + zero) = scale * (q . c) + zero * sum(q), so that codes are multiplied as they
    are; a key shift goes into the query: q . (spread * k + center) = (q * spread) . k + q . center.
    BY_CHANNEL: the scales and zeros are each channel's; ranges_at points to those of its page.
    """
    member = tl.arange(0, MEMBERS)
    present = (member < group)[:, None]
    q_at = member[:, None] * HEAD_DIM
    every = tl.arange(0, PADDED_DIM)
    real = every < HEAD_DIM
    whole = tl.load(q + q_at + every[None, :], mask=present & real[None, :], other=0.0)
    offset = tl.zeros([MEMBERS], tl.float32)
    if spread is not None:
        middles = tl.load(center + every, mask=real, other=0.0).to(tl.float32)
        offset = tl.sum(whole * middles[None, :], axis=1)
        widths = tl.load(spread + every, mask=real, other=0.0).to(tl.float32)
        whole = whole * widths[None, :]
    # Queries are scaled to 1 before they become 16-bit numbers: none overflows, none fades.
    top = tl.maximum(tl.max(tl.abs(whole), axis=1), 1e-30)
    scores = tl.zeros([MEMBERS, at.shape[0]], tl.float32)
    for chunk in range((HEAD_DIM + CHUNK - 1) // CHUNK):
        channel = chunk_channels(chunk, BITS)
        inside = channel < HEAD_DIM
        part = tl.load(q + q_at + channel[None, :], mask=present & inside[None, :], other=0.0)
        if spread is not None:
            width = tl.load(spread + channel, mask=inside, other=0.0).to(tl.float32)
            part = part * width[None, :]
        part = part / top[:, None]
        keys = load_chunk(data, at, chunk, seen, HEAD_DIM, BITS, OPERAND)
        queries = split_parts(part, PARTS, OPERAND)
        if BY_CHANNEL:
            range_at = ranges + ranges_at[:, None] + 2 * channel[None, :]
            step = tl.load(range_at, mask=seen[:, None], other=0.0)
            zero = tl.load(range_at + 1, mask=seen[:, None], other=0.0)
            # fp16 holds a scale but not three times one, so a code's two bits go apart.
            upper = keys >= 2
            odd = tl.where(upper, keys - 2, keys) == 1
            ones = tl.where(odd, step, 0.0).to(OPERAND)
            twos = tl.where(upper, step, 0.0).to(OPERAND)
            dots = tl.dot(queries, tl.trans(twos), input_precision="ieee") * 2
            dots = tl.dot(queries, tl.trans(ones), acc=dots, input_precision="ieee")
            dots = tl.dot(queries, tl.trans(zero), acc=dots, input_precision="ieee")
        else:
            dots = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        dots = join_parts(dots, PARTS)
        if BITS != AS_STORED and not BY_CHANNEL:
            step = tl.load(ranges + ranges_at + 2 * chunk, mask=seen, other=0.0).to(tl.float32)
            zero = tl.load(ranges + ranges_at + 2 * chunk + 1, mask=seen, other=0.0)
            shares = tl.sum(part, axis=1)[:, None] * zero.to(tl.float32)[None, :]
            dots = dots * step[None, :] + shares
        scores += dots
    return (scores * top[:, None] + offset[:, None]) * scale


@jit_varying("chosen_count", "first_place", "places")
def attend_split(
    q: tl.tensor,
    sequences: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    ring: tl.tensor,
    chosen: tl.tensor,
    center: tl.tensor,
    spread: tl.tensor,
    data: tl.tensor,
    ranges: tl.tensor,
    sums: tl.tensor,
    tops: tl.tensor,
    totals: tl.tensor,
    group: tl.tensor,
    kv_heads: tl.tensor,
    chosen_count: tl.tensor,
    first_place: tl.tensor,
    places: tl.tensor,
    table_sequence: tl.tensor,
    table_head: tl.tensor,
    data_page: tl.tensor,
    data_half: tl.tensor,
    data_slot: tl.tensor,
    ranges_page: tl.tensor,
    ranges_half: tl.tensor,
    ranges_slot: tl.tensor,
    scale: tl.tensor,
    SLOTS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """One split of one region for one row and kv head: its part of the softmax, unmerged."""
    # Rows come first in the grid: rows of one sequence then read the same pages at about the same
    # time, all but the first from the L2 cache.
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences + row)
    of_row = row.to(tl.int64) * kv_heads + head
    slot, seen = visible_slots(
        row, head, split, sequence, start, stop, ring, chosen, chosen_count, kv_heads, SLOTS
    )
    member = tl.arange(0, MEMBERS)
    present = member < group
    out = (of_row * places + first_place + split) * group + member
    if tl.max(seen.to(tl.int32), axis=0) == 1:
        pages = table + sequence.to(tl.int64) * table_sequence + head * table_head
        page, place = find_slots(pages, slot, seen, PAGE_SLOTS)
        at = page * data_page + place * data_slot
        ranges_at = page * ranges_page + place * ranges_slot
        shift_at = (sequence.to(tl.int64) * kv_heads + head) * HEAD_DIM
        scores = query_scores(
            q + of_row * group * HEAD_DIM,
            center + shift_at if center is not None else None,
            spread + shift_at if spread is not None else None,
            data,
            at,
            ranges,
            page * ranges_page if BY_CHANNEL else ranges_at,
            seen,
            group,
            scale,
            MEMBERS,
            PARTS,
            HEAD_DIM,
            PADDED_DIM,
            BITS,
            BY_CHANNEL,
            OPERAND,
        )
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.max(scores, axis=1)
        weights = tl.exp2(scores - top[:, None] + LIFT)
        lowered = tl.exp2(-LIFT)
        tl.store(tops + out, top, mask=present)
        tl.store(totals + out, tl.sum(weights, axis=1) * lowered, mask=present)
        for chunk in range((HEAD_DIM + CHUNK - 1) // CHUNK):
            values = load_chunk(data, at + data_half, chunk, seen, HEAD_DIM, BITS, OPERAND)
            if BITS == AS_STORED:
                mixed = tl.dot(split_parts(weights, PARTS, OPERAND), values, input_precision="ieee")
                mixed = join_parts(mixed, PARTS)
            else:
                range_at = ranges + ranges_at + ranges_half + 2 * chunk
                step = tl.load(range_at, mask=seen, other=0.0).to(tl.float32)
                zero = tl.load(range_at + 1, mask=seen, other=0.0).to(tl.float32)
                # The steps differ by slot, so they go into the weights; relative to the largest
                # of them, because weights have to stay below what fp16 holds. 2^-24 is the
                # smallest step there is.
                widest = tl.maximum(tl.max(step, axis=0), 5.9604644775390625e-08)
                stepped = weights * (step / widest)[None, :]
                mixed = tl.dot(split_parts(stepped, PARTS, OPERAND), values, input_precision="ieee")
                mixed = join_parts(mixed, PARTS) * widest
                mixed += tl.sum(weights * zero[None, :], axis=1)[:, None]
            channel = chunk_channels(chunk, BITS)
            tl.store(
                sums + out[:, None] * HEAD_DIM + channel[None, :],
                mixed * lowered,
                mask=present[:, None] & (channel < HEAD_DIM)[None, :],
            )


@jit_varying("chosen_count", "width")
def store_probabilities(
    q: tl.tensor,
    sequences: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    ring: tl.tensor,
    chosen: tl.tensor,
    center: tl.tensor,
    spread: tl.tensor,
    data: tl.tensor,
    ranges: tl.tensor,
    first_column: tl.tensor,
    ranks: tl.tensor,
    lse: tl.tensor,
    out: tl.tensor,
    group: tl.tensor,
    kv_heads: tl.tensor,
    chosen_count: tl.tensor,
    width: tl.tensor,
    table_sequence: tl.tensor,
    table_head: tl.tensor,
    data_page: tl.tensor,
    data_half: tl.tensor,
    data_slot: tl.tensor,
    ranges_page: tl.tensor,
    ranges_half: tl.tensor,
    ranges_slot: tl.tensor,
    scale: tl.tensor,
    SLOTS: tl.constexpr,
    PAGE_SLOTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """Scores once more, now with the log-sum-exp over all regions known: exp2(score - lse).

    first_column [rows, kv_heads]: where the region's slots begin in a row of the answer; ranks,
    only with chosen and in its shape: how many slots are chosen before each.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(sequences + row)
    of_row = row.to(tl.int64) * kv_heads + head
    slot, seen = visible_slots(
        row, head, split, sequence, start, stop, ring, chosen, chosen_count, kv_heads, SLOTS
    )
    member = tl.arange(0, MEMBERS)
    present = member < group
    if tl.max(seen.to(tl.int32), axis=0) == 1:
        pages = table + sequence.to(tl.int64) * table_sequence + head * table_head
        page, place = find_slots(pages, slot, seen, PAGE_SLOTS)
        at = page * data_page + place * data_slot
        ranges_at = page * ranges_page + place * ranges_slot
        shift_at = (sequence.to(tl.int64) * kv_heads + head) * HEAD_DIM
        scores = query_scores(
            q + of_row * group * HEAD_DIM,
            center + shift_at if center is not None else None,
            spread + shift_at if spread is not None else None,
            data,
            at,
            ranges,
            page * ranges_page if BY_CHANNEL else ranges_at,
            seen,
            group,
            scale,
            MEMBERS,
            PARTS,
            HEAD_DIM,
            PADDED_DIM,
            BITS,
            BY_CHANNEL,
            OPERAND,
        )
        known = tl.load(lse + of_row * group + member, mask=present, other=0.0)
        rank = split * SLOTS + tl.arange(0, SLOTS)
        if ranks is not None:
            rank = tl.load(ranks + of_row * chosen_count + rank, mask=seen, other=0)
        column = tl.load(first_column + of_row) + rank
        row_at = (of_row * group + member) * width
        tl.store(
            out + row_at[:, None] + column[None, :],
            tl.exp2(scores - known[:, None]),
            mask=present[:, None] & seen[None, :],
        )
