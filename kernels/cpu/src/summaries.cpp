// The tokens whose chunks promise the most attention (RocketKV); `reference.choose_slots` says what.
#include <numeric>

#include "common.hpp"

namespace pask {
namespace {

struct Call {
    int64_t rows, heads, group, dim;
    const float* q;
    const int32_t *sequence, *stop;
    int64_t chunk, channels, count;
    int32_t* answer;
    Pages pages;
    Table table;
    int64_t threads;

    explicit Call(Arguments& from)
        : rows(from.number()),
          heads(from.number()),
          group(from.number()),
          dim(from.number()),
          q(from.pointer<const float>()),
          sequence(from.pointer<const int32_t>()),
          stop(from.pointer<const int32_t>()),
          chunk(from.number()),
          channels(from.number()),
          count(from.number()),
          answer(from.pointer<int32_t>()),
          pages(from),
          table(from),
          threads(from.number()) {}
};

// One row and kv head.
class Job {
public:
    explicit Job(const Call& call) : call_(call) {}

    int choose(int64_t row, int64_t head) {
        const int64_t at = row * call_.heads + head;
        int32_t* answer = call_.answer + at * call_.count;
        std::fill(answer, answer + call_.count, -1);
        const int64_t stored = call_.stop[at], chunks = (stored + call_.chunk - 1) / call_.chunk;
        if (stored <= 0) return kDone;
        const float* q = call_.q + at * call_.group * call_.dim;
        pick_channels(q);
        if (!gather(call_.sequence[row], head, chunks)) return kBadIndex;
        score(q, stored, chunks);
        // Best chunks first, the later of two equal ones; a chunk gives its last tokens first.
        order_.resize(chunks);
        std::iota(order_.begin(), order_.end(), 0);
        const auto better = [&](int64_t a, int64_t b) {
            return total_[a] != total_[b] ? total_[a] > total_[b] : a > b;
        };
        const int64_t wanted = std::min(stored, call_.count);
        const int64_t enough = std::min(chunks, wanted / call_.chunk + 2);
        std::partial_sort(order_.begin(), order_.begin() + enough, order_.end(), better);
        int64_t chosen = 0;
        for (int64_t i = 0; chosen < wanted; ++i) {
            const int64_t first = order_[i] * call_.chunk;
            const int64_t stop = std::min(first + call_.chunk, stored);
            for (int64_t slot = stop; slot-- > first && chosen < wanted;)
                answer[chosen++] = static_cast<int32_t>(slot);
        }
        std::sort(answer, answer + wanted);
        return kDone;
    }

private:
    // The channels of largest summed |q|, and for each whether the group's sum is positive.
    void pick_channels(const float* q) {
        std::vector<float> size(call_.dim), sum(call_.dim);
        for (int64_t g = 0; g < call_.group; ++g)
            for (int64_t c = 0; c < call_.dim; ++c) {
                size[c] += __builtin_fabsf(q[g * call_.dim + c]);
                sum[c] += q[g * call_.dim + c];
            }
        std::vector<int64_t> all(call_.dim);
        std::iota(all.begin(), all.end(), 0);
        std::stable_sort(all.begin(), all.end(),
                         [&](int64_t a, int64_t b) { return size[a] > size[b]; });
        all.resize(std::min(call_.channels, call_.dim));
        top_ = all;
        positive_.clear();
        for (const int64_t c : top_) positive_.push_back(sum[c] > 0);
    }

    // corner_[channel, chunk]: the maximum or minimum of each chunk in the picked channels.
    bool gather(int64_t sequence, int64_t head, int64_t chunks) {
        const Pages& pages = call_.pages;
        const int64_t bytes = slot_bytes(pages.kind, call_.dim);
        corner_.resize(top_.size() * chunks);
        for (int64_t i = 0; i < chunks; ++i) {
            const int64_t index = call_.table.find(pages, sequence, head, i);
            if (index < 0) return false;
            const uint8_t* low = pages.data + index * bytes;
            const uint8_t* high = low + pages.page_slots * bytes;
            for (size_t c = 0; c < top_.size(); ++c)
                corner_[c * chunks + i] = value(positive_[c] ? high : low, top_[c]);
        }
        return true;
    }

    float value(const uint8_t* slot, int64_t channel) const {
        if (call_.pages.kind == kF32) return reinterpret_cast<const float*>(slot)[channel];
        const uint16_t half = reinterpret_cast<const uint16_t*>(slot)[channel];
        if (call_.pages.kind == kF16) return from_half(half);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }

    // total_[chunk]: the softmax weight of one of its tokens, summed over the group.
    void score(const float* q, int64_t stored, int64_t chunks) {
        total_.assign(chunks, 0.0f);
        line_.resize((chunks + 7) / 8 * 8);
        for (int64_t g = 0; g < call_.group; ++g, q += call_.dim) {
            std::fill(line_.begin(), line_.end(), 0.0f);
            float picked = 0, all = 0;
            for (size_t c = 0; c < top_.size(); ++c) {
                const float x = q[top_[c]];
                picked += __builtin_fabsf(x);
                const float* corner = &corner_[c * chunks];
                for (int64_t i = 0; i < chunks; ++i) line_[i] += x * corner[i];
            }
            for (int64_t c = 0; c < call_.dim; ++c) all += __builtin_fabsf(q[c]);
            constexpr float tiny = 1.17549435e-38f;
            const float share = picked / std::max(all, tiny);
            const float root = __builtin_sqrtf(std::max(call_.dim * share, tiny));
            for (int64_t i = 0; i < chunks; ++i) line_[i] /= root;
            exponentials(line_.data(), chunks);
            float sum = 0;
            for (int64_t i = 0; i < chunks; ++i)
                sum += line_[i] * std::min(call_.chunk, stored - i * call_.chunk);
            for (int64_t i = 0; i < chunks; ++i) total_[i] += line_[i] / sum;
        }
    }

    const Call& call_;
    std::vector<int64_t> top_, order_;
    std::vector<char> positive_;
    std::vector<float> corner_, line_, total_;
};

}  // namespace
}  // namespace pask

extern "C" int pask_choose_slots(const int64_t* values) {
    using namespace pask;
    Arguments from(values);
    const Call call(from);
    auto work = [job = Job(call), &call](int64_t i) mutable {
        return job.choose(i / call.heads, i % call.heads);
    };
    int64_t size = 0;
    for (int64_t i = 0; i < call.rows * call.heads; ++i) size += call.stop[i] / call.chunk;
    return run_jobs(call.rows * call.heads, call.threads, size, work);
}
