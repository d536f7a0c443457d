// Writing tokens into pages: as they are, quantised, or into the bounds of their chunks.
#include "common.hpp"

namespace pask {
namespace {

// The rows of an append: k and v [rows, kv_heads, head_dim] fp32 (v null for bounds).
struct Call {
    int64_t rows, dim;
    const float *k, *v;
    const int32_t *sequence, *slot;
    Pages pages;
    Table table;

    explicit Call(Arguments& from)
        : rows(from.number()),
          dim(from.number()),
          k(from.pointer<const float>()),
          v(from.pointer<const float>()),
          sequence(from.pointer<const int32_t>()),
          slot(from.pointer<const int32_t>()),
          pages(from),
          table(from) {}

    // Calls use(k, v, index of the key's half slot, token slot, sequence, head) for what is
    // written, rows in order; slots are divided by `chunk` first.
    template <class Use>
    int each(int64_t chunk, const Use& use) const {
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t head = 0; head < table.heads; ++head) {
                const int64_t at = row * table.heads + head;
                if (slot[at] < 0) continue;
                const int64_t index = table.find(pages, sequence[row], head, slot[at] / chunk);
                if (index < 0) return kBadIndex;
                use(k + at * dim, v ? v + at * dim : nullptr, index, slot[at], sequence[row], head);
            }
        }
        return kDone;
    }
};

// One group of 32 values as codes, scale and zero; `reference.quantise` says how to the bit.
inline void quantise(const float* x, int bits, uint8_t* codes, uint16_t* range) {
    __m256 part[4];
    for (int i = 0; i < 4; ++i) part[i] = _mm256_loadu_ps(x + 8 * i);
    const __m256 most = _mm256_max_ps(_mm256_max_ps(part[0], part[1]),
                                      _mm256_max_ps(part[2], part[3]));
    const __m256 least = _mm256_min_ps(_mm256_min_ps(part[0], part[1]),
                                       _mm256_min_ps(part[2], part[3]));
    const float high = max8(most);
    const float low = -max8(_mm256_sub_ps(_mm256_setzero_ps(), least));
    const float top = static_cast<float>((1 << bits) - 1);
    range[0] = to_half((high - low) / top);
    if ((range[0] & 0x7fff) == 0) range[0] = to_half(1.0f);
    range[1] = to_half(low);
    const __m256 scale = _mm256_set1_ps(from_half(range[0]));
    const __m256 zero = _mm256_set1_ps(from_half(range[1]));
    for (int i = 0; i < 4; ++i) {
        __m256 step = _mm256_div_ps(_mm256_sub_ps(part[i], zero), scale);
        step = _mm256_round_ps(step, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        step = _mm256_min_ps(_mm256_max_ps(step, _mm256_setzero_ps()), _mm256_set1_ps(top));
        const __m256i whole = _mm256_cvtps_epi32(step);
        const __m256i words = _mm256_packus_epi32(whole, whole);
        const __m256i bytes = _mm256_packus_epi16(words, words);
        const uint32_t halves[2] = {static_cast<uint32_t>(_mm256_extract_epi32(bytes, 0)),
                                    static_cast<uint32_t>(_mm256_extract_epi32(bytes, 4))};
        std::memcpy(codes + 8 * i, halves, 8);
    }
}

// The codes of one group into its 4 * bits bytes; `reference.pack` says where each lies.
inline void pack(const uint8_t* codes, int bits, uint8_t* out) {
    if (bits == 3) {
        uint32_t high = 0;
        uint8_t low[kGroup];
        for (int c = 0; c < kGroup; ++c) {
            low[c] = codes[c] & 3;
            high |= static_cast<uint32_t>(codes[c] >> 2) << c;
        }
        pack(low, 2, out);
        std::memcpy(out + 8, &high, 4);
        return;
    }
    for (int w = 0; w < 8; ++w) {
        uint32_t word = 0;
        for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(codes[w + 8 * i]) << (bits * i);
        std::memcpy(out + w * bits / 2, &word, bits / 2);
    }
}

}  // namespace
}  // namespace pask

extern "C" int pask_append_high(const int64_t* values) {
    using namespace pask;
    Arguments from(values);
    const Call call(from);
    const Pages& pages = call.pages;
    const int64_t bytes = slot_bytes(pages.kind, call.dim);
    return call.each(1, [&](const float* k, const float* v, int64_t index, int64_t, int64_t,
                            int64_t) {
        uint8_t* key = pages.data + index * bytes;
        uint8_t* value = key + pages.page_slots * bytes;
        for (int64_t c = 0; c < call.dim / 8; ++c) {
            store8(pages.kind, key, c, _mm256_loadu_ps(k + 8 * c));
            store8(pages.kind, value, c, _mm256_loadu_ps(v + 8 * c));
        }
    });
}

extern "C" int pask_append_low(const int64_t* values) {
    using namespace pask;
    Arguments from(values);
    const Call call(from);
    const uint16_t* center = from.pointer<const uint16_t>();
    const uint16_t* spread = from.pointer<const uint16_t>();
    const Pages& pages = call.pages;
    const int bits = code_bits(pages.kind);
    const int64_t bytes = slot_bytes(pages.kind, call.dim), groups = call.dim / kGroup;
    std::vector<float> shifted(call.dim);
    return call.each(1, [&](const float* k, const float* v, int64_t index, int64_t,
                            int64_t sequence, int64_t head) {
        const int64_t owner = (sequence * call.table.heads + head) * call.dim;
        for (int64_t c = 0; spread && c < call.dim; c += 8) {
            const __m256 m = load_f16(reinterpret_cast<const uint8_t*>(center + owner + c));
            const __m256 s = load_f16(reinterpret_cast<const uint8_t*>(spread + owner + c));
            _mm256_storeu_ps(&shifted[c],
                             _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(k + c), m), s));
        }
        for (int half = 0; half < 2; ++half) {
            const float* x = half ? v : spread ? shifted.data() : k;
            const int64_t at = index + half * pages.page_slots;
            for (int64_t group = 0; group < groups; ++group) {
                uint8_t codes[kGroup];
                quantise(x + group * kGroup, bits, codes,
                         pages.ranges + (at * groups + group) * 2);
                pack(codes, bits, pages.data + at * bytes + group * 4 * bits);
            }
        }
    });
}

extern "C" int pask_append_bounds(const int64_t* values) {
    using namespace pask;
    Arguments from(values);
    const Call call(from);
    const int64_t chunk = from.number();
    const Pages& pages = call.pages;
    const int64_t bytes = slot_bytes(pages.kind, call.dim);
    return call.each(chunk, [&](const float* k, const float*, int64_t index, int64_t slot, int64_t,
                                int64_t) {
        uint8_t* low = pages.data + index * bytes;
        uint8_t* high = low + pages.page_slots * bytes;
        const bool opens = slot % chunk == 0;
        for (int64_t c = 0; c < call.dim / 8; ++c) {
            // Rounding keeps the order, so the smaller of the fp32 values rounds to the smaller.
            const __m256 x = _mm256_loadu_ps(k + 8 * c);
            store8(pages.kind, low, c, opens ? x : _mm256_min_ps(x, load8(pages.kind, low, c)));
            store8(pages.kind, high, c, opens ? x : _mm256_max_ps(x, load8(pages.kind, high, c)));
        }
    });
}
