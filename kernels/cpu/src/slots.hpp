// Dot products with slots, and weighted sums of slots, for every kind of page.
//
// A query's result for a slot is made by the same operations in the same order whatever other
// queries and slots are handled beside it: eight lanes over the channels, blocks ascending, one
// fixed tree over the lanes; weighted sums add slot after slot. The blocking only shares loads.
//
// Quantised slots are never turned into values. With a value scale * code + zero in a group,
//     q . k = sum_groups scale (q . codes) + zero (sum of q),
//     sum_slots p v = sum_slots (p scale) codes + (sum_slots p zero)
// and codes are taken as code * power, the power of two at which they lie in their word, so that
// no shift is needed: queries and answers are divided by it, which is exact.
#pragma once

#include <type_traits>

#include "common.hpp"

#define PASK_INLINE __attribute__((always_inline)) inline

namespace pask {

constexpr int kTile = 32;    // slots handled at once: in fp32 they fit the first-level cache
constexpr int kQueries = 3;  // queries handled at once: sixteen registers hold their sums
constexpr int kCodes = kKinds;  // one more kind of slot: fp32 copies of code * power

constexpr bool is_float(int kind) { return kind == kF32 || kind == kF16 || kind == kBF16; }

// The power of two by which codes of channels 8 j on of a group are multiplied.
inline float power_of(int kind, int64_t j) {
    if (kind == kQ8 && j == 3) return 1.0f;
    const int width = kind == kQ3 ? 2 : code_bits(kind);
    return static_cast<float>(1 << (width * j));
}

// Some slots of one half of a pool: slot i's numbers start at data + index[i] * bytes. Of
// quantised ones, group g's scale is scale[g * kTile + i], and its zero likewise.
struct Slots {
    const uint8_t* data;
    int64_t bytes, dim;
    const int64_t* index;
    const float *scale, *zero;

    PASK_INLINE const uint8_t* at(int64_t i) const { return data + index[i] * bytes; }
};

// Eight numbers at a time of a slot, `chunks` times, from channel 8 * chunks * block on. They are
// made when they are used: the sums need the registers.
template <int kind, int chunks>
struct Part {
    static_assert(is_float(kind) || kind == kCodes, "the others are below");
    PASK_INLINE Part(const Slots& slots, int64_t i, int64_t block)
        : at(slots.at(i) + chunks * block * (kind == kF16 || kind == kBF16 ? 16 : 32)) {}
    PASK_INLINE __m256 numbers(int c) const { return load8(kind == kCodes ? kF32 : kind, at, c); }
    const uint8_t* at;
};

template <>
struct Part<kQ4, 4> {
    PASK_INLINE Part(const Slots& slots, int64_t i, int64_t block)
        : x(_mm256_cvtepu16_epi32(
              _mm_loadu_si128(reinterpret_cast<const __m128i*>(slots.at(i) + 16 * block)))) {}
    PASK_INLINE __m256 numbers(int c) const {
        return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15 << (4 * c))));
    }
    __m256i x;
};

template <>
struct Part<kQ8, 4> {
    PASK_INLINE Part(const Slots& slots, int64_t i, int64_t block)
        : x(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(slots.at(i) + 32 * block))) {}
    PASK_INLINE __m256 numbers(int c) const {
        return _mm256_cvtepi32_ps(c == 3 ? _mm256_srli_epi32(x, 24)  // else it would be negative
                                         : _mm256_and_si256(x, _mm256_set1_epi32(255 << (8 * c))));
    }
    __m256i x;
};

template <>
struct Part<kQ2, 4> {
    PASK_INLINE Part(const Slots& slots, int64_t i, int64_t block)
        : x(_mm256_cvtepu8_epi32(
              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(slots.at(i) + 8 * block)))) {}
    PASK_INLINE __m256 numbers(int c) const {
        return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(3 << (2 * c))));
    }
    __m256i x;
};

template <>
struct Part<kQ3, 4> {
    PASK_INLINE Part(const Slots& slots, int64_t i, int64_t block) {
        const uint8_t* at = slots.at(i) + 12 * block;
        low = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        uint32_t bits;
        std::memcpy(&bits, at + 8, 4);
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        high = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    }
    PASK_INLINE __m256 numbers(int c) const {
        // Lane w of `high` has the high bit of channel 8 c + w at 8 c; above its low bits it is due
        // at 2 c + 2.
        const __m256i moved = c == 0 ? _mm256_slli_epi32(high, 2)
                                     : _mm256_srli_epi32(high, c == 0 ? 0 : 6 * c - 2);
        const __m256i top = _mm256_and_si256(moved, _mm256_set1_epi32(4 << (2 * c)));
        const __m256i rest = _mm256_and_si256(low, _mm256_set1_epi32(3 << (2 * c)));
        return _mm256_cvtepi32_ps(_mm256_or_si256(top, rest));
    }
    __m256i low, high;
};

// Calls Step::run<kind, chunks>(block, arguments...) for all channels: blocks of 32, and the rest.
// Everything is inlined and unrolled, so that sums stay in registers from block to block.
template <class Step, int kind, class... Rest>
PASK_INLINE void each_block(int64_t dim, Rest&&... rest) {
    const int64_t blocks = dim / 32;
    for (int64_t block = 0; block < blocks; ++block) Step::template run<kind, 4>(block, rest...);
    if constexpr (is_float(kind)) {
        for (int64_t chunk = 4 * blocks; chunk < dim / 8; ++chunk)
            Step::template run<kind, 1>(chunk, rest...);
    }
}

// sum[n][s] += the products of q[n] with slot i + s, lane by lane.
template <int queries, int slots_at_once>
struct DotStep {
    template <int kind, int chunks>
    PASK_INLINE static void run(int64_t block, const Slots& slots, int64_t i, const float* q,
                                __m256 (&sum)[queries][slots_at_once]) {
        const float* from = q + 8 * chunks * block;
#pragma GCC unroll 4
        for (int s = 0; s < slots_at_once; ++s) {
            const Part<kind, chunks> part(slots, i + s, block);
            __m256 inside[queries];
#pragma GCC unroll 4
            for (int c = 0; c < chunks; ++c) {
                const __m256 k = part.numbers(c);
#pragma GCC unroll 4
                for (int n = 0; n < queries; ++n) {
                    const __m256 lanes = _mm256_loadu_ps(from + n * slots.dim + 8 * c);
                    if constexpr (is_float(kind)) {
                        sum[n][s] = _mm256_fmadd_ps(k, lanes, sum[n][s]);
                    } else {
                        inside[n] = c == 0 ? _mm256_mul_ps(k, lanes)
                                           : _mm256_fmadd_ps(k, lanes, inside[n]);
                    }
                }
            }
            if constexpr (!is_float(kind)) {
                const __m256 scale = _mm256_broadcast_ss(slots.scale + block * kTile + i + s);
#pragma GCC unroll 4
                for (int n = 0; n < queries; ++n)
                    sum[n][s] = _mm256_fmadd_ps(inside[n], scale, sum[n][s]);
            }
        }
    }
};

// Sums of the lanes of four vectors.
inline __m128 sum4(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// scores[n * stride + i - first] = q[n] . numbers of slot i, for first <= i < stop; of codes, with
// the scale but without the zero.
template <int kind, int queries>
void dots(const Slots& given, int64_t first, int64_t stop, const float* q, float* scores,
          int64_t stride) {
    const Slots slots = given;
    int64_t i = first;
    for (; i + 4 <= stop; i += 4) {
        __m256 sum[queries][4] = {};
        each_block<DotStep<queries, 4>, kind>(slots.dim, slots, i, q, sum);
#pragma GCC unroll 4
        for (int n = 0; n < queries; ++n)
            _mm_storeu_ps(scores + n * stride + i - first,
                          sum4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]));
    }
    for (; i < stop; ++i) {
        __m256 sum[queries][1] = {};
        each_block<DotStep<queries, 1>, kind>(slots.dim, slots, i, q, sum);
#pragma GCC unroll 4
        for (int n = 0; n < queries; ++n)
            _mm_store_ss(scores + n * stride + i - first,
                         sum4(sum[n][0], sum[n][0], sum[n][0], sum[n][0]));
    }
}

// out[n] += weights[n] . numbers of slots, in the channels of a block; codes' weights with the
// scale.
template <int queries>
struct AddStep {
    template <int kind, int chunks>
    PASK_INLINE static void run(int64_t block, const Slots& slots, int64_t first, int64_t stop,
                                const float* weights, int64_t stride, float* out) {
        float scaled[queries][kTile];
        if constexpr (!is_float(kind)) {
            const float* scale = slots.scale + block * kTile + first;
            for (int n = 0; n < queries; ++n)
                for (int64_t i = 0; i < stop - first; ++i)
                    scaled[n][i] = weights[n * stride + i] * scale[i];
            weights = scaled[0], stride = kTile;
        }
        // Three queries' sums, their weights and a group's codes are more than sixteen registers.
        constexpr int at_once = queries == 3 && !is_float(kind) && kind != kCodes ? 2 : chunks;
#pragma GCC unroll 2
        for (int half = 0; half < chunks; half += at_once) {
            float* to = out + 8 * (chunks * block + half);
            __m256 sum[queries][at_once];
#pragma GCC unroll 4
            for (int n = 0; n < queries; ++n) {
#pragma GCC unroll 4
                for (int c = 0; c < at_once; ++c)
                    sum[n][c] = _mm256_loadu_ps(to + n * slots.dim + 8 * c);
            }
            for (int64_t i = first; i < stop; ++i) {
                const Part<kind, chunks> part(slots, i, block);
#pragma GCC unroll 4
                for (int c = 0; c < at_once; ++c) {
                    const __m256 v = part.numbers(half + c);
#pragma GCC unroll 4
                    for (int n = 0; n < queries; ++n) {
                        const __m256 weight = _mm256_broadcast_ss(weights + n * stride + i - first);
                        sum[n][c] = _mm256_fmadd_ps(weight, v, sum[n][c]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int n = 0; n < queries; ++n) {
#pragma GCC unroll 4
                for (int c = 0; c < at_once; ++c)
                    _mm256_storeu_ps(to + n * slots.dim + 8 * c, sum[n][c]);
            }
        }
    }
};

// out[n] += sum over first <= i < stop of weights[n * stride + i - first] * numbers of slot i.
template <int kind, int queries>
void add_weighted(const Slots& given, int64_t first, int64_t stop, const float* weights,
                  int64_t stride, float* out) {
    const Slots slots = given;
    each_block<AddStep<queries>, kind>(slots.dim, slots, first, stop, weights, stride, out);
}

struct CopyStep {
    template <int kind, int chunks>
    PASK_INLINE static void run(int64_t block, const Slots& slots, int64_t i, float* out) {
        const Part<kind, chunks> part(slots, i, block);
#pragma GCC unroll 4
        for (int c = 0; c < chunks; ++c)
            _mm256_storeu_ps(out + i * slots.dim + 8 * (chunks * block + c), part.numbers(c));
    }
};

// The slots' numbers in fp32, one slot after the other.
template <int kind>
void to_floats(const Slots& given, int64_t count, float* out) {
    const Slots slots = given;
    for (int64_t i = 0; i < count; ++i) each_block<CopyStep, kind>(slots.dim, slots, i, out);
}

struct Body {
    decltype(&dots<kF32, 1>) dot[kQueries];
    decltype(&add_weighted<kF32, 1>) add[kQueries];
    decltype(&to_floats<kF32>) floats;
};

template <int kind>
constexpr Body body_of() {
    return {{dots<kind, 1>, dots<kind, 2>, dots<kind, 3>},
            {add_weighted<kind, 1>, add_weighted<kind, 2>, add_weighted<kind, 3>},
            to_floats<kind>};
}

constexpr Body kBodies[] = {body_of<kF32>(), body_of<kF16>(), body_of<kBF16>(), body_of<kQ2>(),
                            body_of<kQ3>(),  body_of<kQ4>(),  body_of<kQ8>(),   body_of<kCodes>()};

}  // namespace pask
