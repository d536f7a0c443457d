// Attention of query rows over paged slots: scores of all regions, one softmax, weighted values.
//
// A job is some rows of one sequence, for one kv head. Slots are taken in tiles; a tile that
// several rows or query blocks read is turned into fp32 once. No sum of a row runs over anything
// that depends on the other rows.
#include "slots.hpp"
#include "views.hpp"

namespace pask {
namespace {

// How many of `left` queries to handle next: threes, without a lonely last one.
int64_t next_queries(int64_t left) { return left == 4 ? 2 : std::min<int64_t>(left, kQueries); }

class Job {
public:
    explicit Job(const Call& call) : call_(call), views_(call) {}

    // Rows first .. stop of one sequence, for one kv head.
    int attend(int64_t first, int64_t stop, int64_t head) {
        if (const int status = views_.look(first, stop, head)) return status;
        first_ = first, head_ = head, queries_ = (stop - first) * call_.group;
        const int64_t most = *std::max_element(views_.widths.begin(), views_.widths.end());
        stride_ = (most + 7) / 8 * 8;
        scores_.resize(queries_ * stride_);
        sums_.resize(queries_);
        scale_queries();
        for (size_t r = 0; r < call_.regions.size(); ++r) score(r);
        for (int64_t n = 0; n < queries_; ++n)
            sums_[n] = exponentials(&scores_[n * stride_], views_.widths[n / call_.group]);
        out_.assign(queries_ * call_.dim, 0.0f);
        for (size_t r = 0; r < call_.regions.size(); ++r) add(r);
        answer();
        return kDone;
    }

private:
    int64_t place(int64_t n) const {  // of query n among all queries
        const int64_t row = first_ + n / call_.group;
        return (row * call_.heads + head_) * call_.group + n % call_.group;
    }

    // q / sqrt(head_dim), and with the shift of quantised keys folded in: q spread, q . center.
    void scale_queries() {
        const int64_t dim = call_.dim;
        const int64_t owner = (call_.sequence[first_] * call_.heads + head_) * dim;
        const auto half = [&](const uint16_t* vector, int64_t c) {
            return load_f16(reinterpret_cast<const uint8_t*>(vector + owner + c));
        };
        const float scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(dim)));
        q_.resize(queries_ * dim), shifted_.resize(queries_ * dim), centers_.resize(queries_);
        for (int64_t n = 0; n < queries_; ++n) {
            const float* q = call_.q + place(n) * dim;
            __m256 center = _mm256_setzero_ps();
            for (int64_t c = 0; c < dim; c += 8) {
                const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(q + c), _mm256_set1_ps(scale));
                _mm256_storeu_ps(&q_[n * dim + c], x);
                if (!call_.spread) continue;
                _mm256_storeu_ps(&shifted_[n * dim + c], _mm256_mul_ps(x, half(call_.spread, c)));
                center = _mm256_fmadd_ps(x, half(call_.center, c), center);
            }
            centers_[n] = sum8(center);
        }
    }

    // Calls use(body, slots, first query, how many, first slot, stop slot, their scores)
    // for the tiles of a region's keys (half 0) or values (half 1) and the blocks of queries that
    // see slots in them; slot i of a tile is slot base + i of the views. The grid of tiles does not
    // depend on where a row's view starts.
    template <class Use>
    void each_tile(size_t r, int half, const Use& use) {
        const Pages& pages = call_.regions[r].pages;
        const int64_t bytes = slot_bytes(pages.kind, call_.dim), groups = call_.dim / kGroup;
        const bool low = !is_float(pages.kind), by_channel = pages.by_channel && half == 0;
        ranges_.assign(2 * groups * kTile, 1.0f);  // scales of 1 where keys have theirs by channel
        Slots slots{pages.data + half * pages.page_slots * bytes, bytes, call_.dim, nullptr,
                    ranges_.data(), ranges_.data() + groups * kTile};
        const uint16_t* ranges = pages.ranges + (low ? half * pages.page_slots * groups * 2 : 0);
        for (const Cover& cover : views_.covers[r]) {
            const int64_t stop = cover.start + static_cast<int64_t>(cover.index.size());
            for (int64_t base = cover.start, next; base < stop; base = next) {
                next = std::min(base / kTile * kTile + kTile, stop);
                slots.index = &cover.index[base - cover.start];
                if (by_channel)
                    read_channels(ranges + slots.index[0] / kTile * kTile * groups * 2);
                else if (low)
                    read_ranges(ranges, slots.index, next - base, groups);
                tile(r, slots, base, next - base, cover.first, cover.stop, use);
            }
        }
    }

    // Scales and zeros of a tile in fp32, [2, groups, kTile].
    void read_ranges(const uint16_t* ranges, const int64_t* index, int64_t count, int64_t groups) {
        const auto pair = [&](int64_t i, int64_t group) {
            int32_t both;
            std::memcpy(&both, ranges + (index[std::min(i, count - 1)] * groups + group) * 2, 4);
            return both;
        };
        for (int64_t group = 0; group < groups; ++group) {
            float* scales = &ranges_[group * kTile];
            float* zeros = scales + groups * kTile;
            for (int64_t i = 0; i < count; i += 8) {
                const __m256i both = _mm256_setr_epi32(
                    pair(i, group), pair(i + 1, group), pair(i + 2, group), pair(i + 3, group),
                    pair(i + 4, group), pair(i + 5, group), pair(i + 6, group), pair(i + 7, group));
                const __m256i halves =
                    _mm256_packus_epi32(_mm256_and_si256(both, _mm256_set1_epi32(0xffff)),
                                        _mm256_srli_epi32(both, 16));
                const __m256i apart = _mm256_permute4x64_epi64(halves, 0xd8);
                _mm256_storeu_ps(scales + i, _mm256_cvtph_ps(_mm256_castsi256_si128(apart)));
                _mm256_storeu_ps(zeros + i, _mm256_cvtph_ps(_mm256_extracti128_si256(apart, 1)));
            }
        }
    }

    // Scales and zeros of a page's key channels, [2, head_dim]; scales without the codes' powers.
    void read_channels(const uint16_t* ranges) {
        channels_.resize(2 * call_.dim);
        for (int64_t c = 0; c < call_.dim; ++c) {
            channels_[c] = from_half(ranges[2 * c]) / power_of(kQ2, c / 8 % 4);
            channels_[call_.dim + c] = from_half(ranges[2 * c + 1]);
        }
    }

    template <class Use>
    void tile(size_t r, Slots slots, int64_t base, int64_t count, int64_t first_row,
              int64_t stop_row, const Use& use) {
        int kind = call_.regions[r].pages.kind;
        int64_t order[kTile];
        if (stop_row - first_row > 1 || call_.group > kQueries) {
            floats_.resize(kTile * call_.dim);
            kBodies[kind].floats(slots, count, floats_.data());
            for (int64_t i = 0; i < count; ++i) order[i] = i;
            slots.data = reinterpret_cast<const uint8_t*>(floats_.data());
            slots.bytes = 4 * call_.dim, slots.index = order;
            kind = is_float(kind) ? kF32 : kCodes;
        }
        for (int64_t row = first_row; row < stop_row; ++row) {
            const View& seen = views_.of(r, row);
            const int64_t from = std::max(seen.start, base) - base;
            const int64_t to = std::min(seen.stop, base + count) - base;
            if (from >= to) continue;
            const int64_t column = seen.column + base + from - seen.start;
            for (int64_t g = 0, many; g < call_.group; g += many) {
                const int64_t n = row * call_.group + g;
                many = next_queries(call_.group - g);
                use(kBodies[kind], slots, n, many, from, to, &scores_[n * stride_ + column]);
            }
        }
    }

    void score(size_t r) {
        const int kind = call_.regions[r].pages.kind;
        const int64_t dim = call_.dim, groups = dim / kGroup;
        if (is_float(kind)) {
            each_tile(r, 0, [&](const Body& body, const Slots& slots, int64_t n, int64_t many,
                                int64_t from, int64_t to, float* scores) {
                body.dot[many - 1](slots, from, to, &q_[n * dim], scores, stride_);
            });
            return;
        }
        if (call_.regions[r].pages.by_channel) return score_groups(r);
        const float* q = (call_.spread ? shifted_ : q_).data();
        for_codes_.resize(queries_ * dim), group_sums_.resize(queries_ * groups);
        for (int64_t i = 0; i < queries_ * dim; ++i)
            for_codes_[i] = q[i] / power_of(kind, i / 8 % 4);
        for (int64_t i = 0; i < queries_ * groups; ++i) {
            const float* x = q + i * kGroup;
            group_sums_[i] =
                sum8(_mm256_add_ps(_mm256_add_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)),
                                   _mm256_add_ps(_mm256_loadu_ps(x + 16), _mm256_loadu_ps(x + 24))));
        }
        each_tile(r, 0, [&](const Body& body, const Slots& slots, int64_t n, int64_t many,
                            int64_t from, int64_t to, float* scores) {
            body.dot[many - 1](slots, from, to, &for_codes_[n * dim], scores, stride_);
            for (int64_t m = n; m < n + many; ++m, scores += stride_) {
                for (int64_t g = 0; g < groups; ++g)
                    for (int64_t i = from; i < to; ++i)
                        scores[i - from] = __builtin_fmaf(slots.zero[g * kTile + i],
                                                          group_sums_[m * groups + g],
                                                          scores[i - from]);
                if (!call_.spread) continue;
                for (int64_t i = from; i < to; ++i) scores[i - from] += centers_[m];
            }
        });
    }

    // Keys with ranges by channel: q . k = (q scale) . codes + q . zero, anew in every page; tiles
    // are pages, as neither is longer than the other and slots of such a region do not wrap.
    void score_groups(size_t r) {
        static_assert(kTile == kGroup, "a tile is to lie in one page");
        const int64_t dim = call_.dim;
        for_codes_.resize(kQueries * dim);
        each_tile(r, 0, [&](const Body& body, const Slots& slots, int64_t n, int64_t many,
                            int64_t from, int64_t to, float* scores) {
            float constants[kQueries];
            for (int64_t m = 0; m < many; ++m) {
                __m256 constant = _mm256_setzero_ps();
                for (int64_t c = 0; c < dim; c += 8) {
                    const __m256 x = _mm256_loadu_ps(&q_[(n + m) * dim + c]);
                    const __m256 scale = _mm256_loadu_ps(&channels_[c]);
                    const __m256 zero = _mm256_loadu_ps(&channels_[dim + c]);
                    _mm256_storeu_ps(&for_codes_[m * dim + c], _mm256_mul_ps(x, scale));
                    constant = _mm256_fmadd_ps(x, zero, constant);
                }
                constants[m] = sum8(constant);
            }
            body.dot[many - 1](slots, from, to, for_codes_.data(), scores, stride_);
            for (int64_t m = 0; m < many; ++m)
                for (int64_t i = 0; i < to - from; ++i) scores[m * stride_ + i] += constants[m];
        });
    }

    void add(size_t r) {
        const int kind = call_.regions[r].pages.kind;
        const int64_t dim = call_.dim, groups = dim / kGroup;
        if (is_float(kind)) {
            each_tile(r, 1, [&](const Body& body, const Slots& slots, int64_t n, int64_t many,
                                int64_t from, int64_t to, const float* weights) {
                body.add[many - 1](slots, from, to, weights, stride_, &out_[n * dim]);
            });
            return;
        }
        codes_out_.assign(queries_ * dim, 0.0f);
        zeros_.assign(queries_ * groups * 8, 0.0f);
        each_tile(r, 1, [&](const Body& body, const Slots& slots, int64_t n, int64_t many,
                            int64_t from, int64_t to, const float* weights) {
            body.add[many - 1](slots, from, to, weights, stride_, &codes_out_[n * dim]);
            for (int64_t m = n; m < n + many; ++m, weights += stride_)
                for (int64_t g = 0; g < groups; ++g)
                    add_zeros(weights, slots.zero + g * kTile + from, to - from,
                              &zeros_[(m * groups + g) * 8]);
        });
        for (int64_t group = 0; group < queries_ * groups; ++group) {
            const __m256 zero = _mm256_set1_ps(sum8(_mm256_loadu_ps(&zeros_[group * 8])));
            for (int64_t j = 0; j < 4; ++j) {
                float* out = &out_[group * kGroup + 8 * j];
                const __m256 codes = _mm256_loadu_ps(&codes_out_[group * kGroup + 8 * j]);
                const __m256 values = _mm256_fmadd_ps(
                    codes, _mm256_set1_ps(1.0f / power_of(kind, j)), zero);
                _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), values));
            }
        }
    }

    // sums[i % 8] += weights[i] * zeros[i]
    static void add_zeros(const float* weights, const float* zeros, int64_t count, float* sums) {
        __m256 sum = _mm256_loadu_ps(sums);
        int64_t i = 0;
        for (; i + 8 <= count; i += 8)
            sum = _mm256_fmadd_ps(_mm256_loadu_ps(weights + i), _mm256_loadu_ps(zeros + i), sum);
        _mm256_storeu_ps(sums, sum);
        for (; i < count; ++i) sums[i % 8] = __builtin_fmaf(weights[i], zeros[i], sums[i % 8]);
    }

    void answer() {
        for (int64_t n = 0; n < queries_; ++n) {
            const float inverse = 1.0f / sums_[n];
            for (int64_t c = 0; c < call_.dim; ++c)
                call_.out[place(n) * call_.dim + c] = out_[n * call_.dim + c] * inverse;
            if (!call_.weights) continue;
            float* weights = call_.weights + place(n) * call_.width;
            const int64_t width = std::min(views_.widths[n / call_.group], call_.width);
            for (int64_t j = 0; j < width; ++j) weights[j] = scores_[n * stride_ + j] * inverse;
            std::fill(weights + width, weights + call_.width, 0.0f);
        }
    }

    const Call& call_;
    Views views_;
    int64_t first_ = 0, head_ = 0, queries_ = 0, stride_ = 0;
    // By query: as it is, shifted, divided by the codes' powers; its sums by group; q . center.
    std::vector<float> q_, shifted_, for_codes_, group_sums_, centers_;
    std::vector<float> scores_, sums_, out_, codes_out_, zeros_;
    std::vector<float> floats_, ranges_, channels_;  // of a tile
};

}  // namespace
}  // namespace pask

extern "C" int pask_attention(const int64_t* values) {
    using namespace pask;
    Arguments from(values);
    const Call call(from);
    // Runs of rows of one sequence, cut so that their scores stay in the second-level cache.
    std::vector<std::pair<int64_t, int64_t>> runs;
    int64_t slots = 1;
    for (const auto& region : call.regions)
        for (int64_t i = 0; i < call.rows * call.heads; ++i)
            slots = std::max<int64_t>(slots, region.stop[i]);
    const int64_t longest = std::max<int64_t>(1, (1 << 17) / (slots * call.group));
    for (int64_t row = 0, next; row < call.rows; row = next) {
        for (const auto& region : call.regions)
            if (call.sequence[row] < 0 || call.sequence[row] >= region.table.sequences)
                return kBadIndex;
        next = row + 1;
        while (next < call.rows && next - row < longest && call.sequence[next] == call.sequence[row])
            ++next;
        runs.emplace_back(row, next);
    }
    auto work = [job = Job(call), &runs, &call](int64_t i) mutable {
        const auto [first, stop] = runs[i / call.heads];
        return job.attend(first, stop, i % call.heads);
    };
    const int64_t jobs = static_cast<int64_t>(runs.size()) * call.heads;
    return run_jobs(jobs, call.threads, call.rows * call.heads * slots, work);
}
