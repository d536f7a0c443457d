// What the native operations share: argument reading, number formats, threads.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace pask {

// Answers of the operations; the Python side turns them into errors.
enum Status : int { kDone = 0, kNoSlot = 1, kBadIndex = 2 };

// How a slot's values lie in memory; the Python side names them by these numbers.
enum Kind : int { kF32 = 0, kF16 = 1, kBF16 = 2, kQ2 = 3, kQ3 = 4, kQ4 = 5, kQ8 = 6, kKinds = 7 };
constexpr int kQ2Channel = 7;  // two-bit codes, whose keys have their ranges by channel of a page

constexpr int kGroup = 32;  // channels that share a scale and a zero

inline int code_bits(int kind) {
    constexpr int bits[] = {0, 0, 0, 2, 3, 4, 8};
    return bits[kind];
}

// Bytes that one half (key or value) of a slot takes, without its ranges.
inline int64_t slot_bytes(int kind, int64_t dim) {
    if (kind == kF32) return 4 * dim;
    return code_bits(kind) ? dim / 8 * code_bits(kind) : 2 * dim;
}

// Arguments come as one array of int64, pointers included: one cheap ctypes call.
class Arguments {
public:
    explicit Arguments(const int64_t* values) : next_(values) {}
    int64_t number() { return *next_++; }
    template <class T>
    T* pointer() {
        return reinterpret_cast<T*>(static_cast<uintptr_t>(*next_++));
    }

private:
    const int64_t* next_;
};

// One region's or pool's pages: [pages, 2, page_slots, slot bytes]. Ranges are (scale, zero), of a
// half slot's groups one after the other; `by_channel`: of keys instead one of each channel for the
// kGroup slots of a page, as many numbers.
struct Pages {
    int kind;
    bool by_channel;
    uint8_t* data;
    uint16_t* ranges;  // null unless quantised
    int64_t pages, page_slots;

    explicit Pages(Arguments& from)
        : kind(static_cast<int>(from.number())),
          by_channel(kind == kQ2Channel),
          data(from.pointer<uint8_t>()),
          ranges(from.pointer<uint16_t>()),
          pages(from.number()),
          page_slots(from.number()) {
        if (by_channel) kind = kQ2;
    }
};

// [sequences, kv_heads, table_pages] int32.
struct Table {
    const int32_t* entries;
    int64_t sequences, heads, pages;

    explicit Table(Arguments& from)
        : entries(from.pointer<const int32_t>()),
          sequences(from.number()),
          heads(from.number()),
          pages(from.number()) {}

    const int32_t* of(int64_t sequence, int64_t head) const {
        return entries + (sequence * heads + head) * pages;
    }

    // Index of a slot's key among all half slots of the pool, or -1 where no such page exists.
    // The value's index is page_slots more.
    int64_t find(const Pages& pool, int64_t sequence, int64_t head, int64_t slot) const {
        const int64_t index = slot / pool.page_slots;
        if (sequence < 0 || sequence >= sequences || index >= pages) return -1;
        const int64_t page = of(sequence, head)[index];
        if (page < 0 || page >= pool.pages) return -1;
        return page * 2 * pool.page_slots + slot % pool.page_slots;
    }
};

inline float from_half(uint16_t x) { return _cvtsh_ss(x); }
inline uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

inline __m256 load_f32(const uint8_t* at) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
}
inline __m256 load_f16(const uint8_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
inline __m256 load_bf16(const uint8_t* at) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Eight values of an unquantised kind, channel `8 * chunk` on.
inline __m256 load8(int kind, const uint8_t* slot, int64_t chunk) {
    if (kind == kF16) return load_f16(slot + 16 * chunk);
    if (kind == kBF16) return load_bf16(slot + 16 * chunk);
    return load_f32(slot + 32 * chunk);
}

inline void store8(int kind, uint8_t* slot, int64_t chunk, __m256 x) {
    if (kind == kF16) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(slot + 16 * chunk),
                         _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    } else if (kind == kBF16) {
        // Half to even: add 0x7fff and the bit that becomes the last one; NaN stays a NaN.
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
        up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
        const __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(up, 16), _mm256_setzero_si256());
        const __m256i low = _mm256_permute4x64_epi64(words, 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(slot + 16 * chunk),
                         _mm256_castsi256_si128(low));
    } else {
        _mm256_storeu_ps(reinterpret_cast<float*>(slot + 32 * chunk), x);
    }
}

inline float sum8(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_hadd_ps(half, half);
    return _mm_cvtss_f32(_mm_hadd_ps(half, half));
}

inline float max8(__m256 x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// e^x for x <= 0, within 2 units in the last place; 0 below the normal numbers, -inf included. NaN
// stays NaN: max takes its second operand then, and NLT is true.
// x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 6.
inline __m256 exp8(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.33f);
    const __m256 normal = _mm256_cmp_ps(x, least, _CMP_NLT_UQ);
    x = _mm256_max_ps(least, x);
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 power = _mm256_set1_ps(1.0f / 720);
    for (const float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = _mm256_fmadd_ps(power, r, _mm256_set1_ps(factor));
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(power, _mm256_castsi256_ps(exponent)), normal);
}

// A score row in place: e^(x - max), its length padded to eight with zeros; answers the sum.
// `scores` must have room for the padding.
inline float exponentials(float* scores, int64_t count) {
    const int64_t padded = (count + 7) / 8 * 8;
    std::fill(scores + count, scores + padded, -__builtin_inff());
    __m256 top = _mm256_loadu_ps(scores);
    for (int64_t i = 8; i < padded; i += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(scores + i));
    const __m256 most = _mm256_set1_ps(max8(top));
    __m256 total = _mm256_setzero_ps();
    for (int64_t i = 0; i < padded; i += 8) {
        const __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(scores + i), most));
        _mm256_storeu_ps(scores + i, e);
        total = _mm256_add_ps(total, e);
    }
    return sum8(total);
}

// Runs work(job) for every job below `jobs`, on as many threads as asked, fewer if there is little
// to do: `size` counts what is to be read in slots, and a thread takes as long to start as some
// thousands of them. Jobs must not depend on each other; `work` answers a Status, and the worst one
// is the answer. Each thread has a copy of `work`, so that it can hold the thread's own scratch
// memory.
template <class Work>
int run_jobs(int64_t jobs, int64_t threads, int64_t size, const Work& work) {
    threads = std::min({threads, jobs, 1 + size / 4096});
    std::atomic<int64_t> next{0};
    std::atomic<int> worst{kDone};
    auto loop = [&] {
        Work mine = work;
        for (int64_t job = next++; job < jobs; job = next++) {
            const int status = mine(job);
            if (status > worst) worst = status;
        }
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(loop);
    loop();
    for (auto& other : others) other.join();
    return worst;
}

}  // namespace pask
