// What query rows see of each region, and where it lies.
#pragma once

#include "common.hpp"

namespace pask {

struct Region {
    Pages pages;
    Table table;
    const int32_t *start, *stop, *ring;  // start and ring may be null

    explicit Region(Arguments& from)
        : pages(from),
          table(from),
          start(from.pointer<const int32_t>()),
          stop(from.pointer<const int32_t>()),
          ring(from.pointer<const int32_t>()) {}
};

// The arguments of an attention, as `kernels/cpu/attention.py` gives them.
struct Call {
    int64_t rows, heads, group, dim, width, picks;
    const float* q;
    const int32_t *sequence, *chosen;  // chosen may be null
    float *out, *weights;              // weights may be null
    const uint16_t *center, *spread;   // null where keys are not shifted
    int64_t threads;
    std::vector<Region> regions;

    explicit Call(Arguments& from)
        : rows(from.number()),
          heads(from.number()),
          group(from.number()),
          dim(from.number()),
          width(from.number()),
          picks(from.number()),
          q(from.pointer<const float>()),
          sequence(from.pointer<const int32_t>()),
          chosen(from.pointer<const int32_t>()),
          out(from.pointer<float>()),
          weights(from.pointer<float>()),
          center(from.pointer<const uint16_t>()),
          spread(from.pointer<const uint16_t>()),
          threads(from.number()) {
        const int64_t count = from.number();
        for (int64_t i = 0; i < count; ++i) regions.emplace_back(from);
    }
};

// The slots start <= i < stop of a region that a row sees; its first score column is `column`.
struct View {
    int64_t start, stop, column;
};

// Where slots lie that rows first .. stop may see: slot start + i of their views has its key at
// half slot index[i] of the pool. All rows share one cover, but with chosen slots each has its own.
struct Cover {
    int64_t first, stop, start;
    std::vector<int64_t> index;
};

// The views of some rows of one sequence, for one kv head.
class Views {
public:
    explicit Views(const Call& call) : call_(call) {}

    int64_t rows = 0;
    std::vector<int64_t> widths;              // slots that each row sees
    std::vector<std::vector<Cover>> covers;   // by region

    const View& of(size_t region, int64_t row) const { return views_[region * rows + row]; }

    // Rows first .. stop; answers a Status.
    int look(int64_t first, int64_t stop, int64_t head) {
        first_ = first, rows = stop - first, head_ = head;
        views_.resize(call_.regions.size() * rows);
        covers.resize(call_.regions.size());
        widths.assign(rows, 0);
        picked_.resize(rows);
        for (int64_t row = 0; row < rows; ++row) {
            for (size_t r = 0; r < call_.regions.size(); ++r) look_at(r, row);
            if (widths[row] == 0) return kNoSlot;
        }
        for (size_t r = 0; r < call_.regions.size(); ++r)
            if (!cover(r)) return kBadIndex;
        return kDone;
    }

private:
    void look_at(size_t r, int64_t row) {
        const Region& region = call_.regions[r];
        const int64_t at = (first_ + row) * call_.heads + head_;
        View seen{region.start ? region.start[at] : 0, region.stop[at], widths[row]};
        if (r == 0 && call_.chosen) {
            picked_[row].clear();
            const int32_t* picks = call_.chosen + at * call_.picks;
            for (int64_t i = 0; i < call_.picks; ++i)
                if (picks[i] >= 0) picked_[row].push_back(picks[i]);
            seen.start = 0, seen.stop = static_cast<int64_t>(picked_[row].size());
        }
        seen.stop = std::max(seen.start, seen.stop);
        widths[row] += seen.stop - seen.start;
        views_[r * rows + row] = seen;
    }

    bool cover(size_t r) {
        const bool chosen = r == 0 && call_.chosen;
        covers[r].resize(chosen ? rows : 1);
        for (int64_t i = 0; i < static_cast<int64_t>(covers[r].size()); ++i) {
            Cover& cover = covers[r][i];
            cover.first = chosen ? i : 0, cover.stop = chosen ? i + 1 : rows;
            int64_t start = INT64_MAX, stop = 0;
            for (int64_t row = cover.first; row < cover.stop; ++row) {
                const View& seen = of(r, row);
                if (seen.start == seen.stop) continue;
                start = std::min(start, seen.start);
                stop = std::max(stop, seen.stop);
            }
            cover.start = std::min(start, stop);
            cover.index.resize(stop - cover.start);
            if (!locate(call_.regions[r], chosen ? picked_[i].data() : nullptr, cover))
                return false;
        }
        return true;
    }

    // False where the table names no page for a slot.
    bool locate(const Region& region, const int32_t* picks, Cover& cover) const {
        const int64_t sequence = call_.sequence[first_];
        const int64_t ring = region.ring ? region.ring[sequence] : 0;
        int64_t slot = 0, place = 0;
        for (size_t i = 0; i < cover.index.size(); ++i) {
            // Neighbours in a page need no look at the table: that would take a division.
            if (i > 0 && !picks && ++place < region.pages.page_slots && ++slot != ring) {
                cover.index[i] = cover.index[i - 1] + 1;
                continue;
            }
            slot = picks ? picks[i] : cover.start + static_cast<int64_t>(i);
            if (ring > 0) slot %= ring;
            place = slot % region.pages.page_slots;
            cover.index[i] = region.table.find(region.pages, sequence, head_, slot);
            if (cover.index[i] < 0) return false;
        }
        return true;
    }

    const Call& call_;
    int64_t first_ = 0, head_ = 0;
    std::vector<View> views_;  // [regions, rows]
    std::vector<std::vector<int32_t>> picked_;
};

}  // namespace pask
