// Softmax of causal score rows, summed by key.
#include "common.hpp"

// mass[h, j] += sum over rows i of softmax(scores[h, i, 0 .. keys - rows + i])[j]: row i of a block
// of the last `rows` queries sees all keys but the ones after it.
//
// scores: [heads, rows, keys] fp32, used up; mass: [heads, .] fp32, `stride` floats a head.
extern "C" int pask_softmax_columns(const int64_t* values) {
    using namespace pask;
    Arguments from(values);
    float* scores = from.pointer<float>();
    const int64_t heads = from.number(), rows = from.number(), keys = from.number();
    float* mass = from.pointer<float>();
    const int64_t stride = from.number(), threads = from.number();
    auto work = [&, line = std::vector<float>((keys + 7) / 8 * 8)](int64_t head) mutable {
        float* sums = mass + head * stride;
        for (int64_t row = 0; row < rows; ++row) {
            const float* given = scores + (head * rows + row) * keys;
            const int64_t seen = keys - rows + row + 1;
            std::copy(given, given + seen, line.begin());
            const __m256 inverse = _mm256_set1_ps(1.0f / exponentials(line.data(), seen));
            int64_t j = 0;
            for (; j + 8 <= seen; j += 8)
                _mm256_storeu_ps(sums + j, _mm256_fmadd_ps(_mm256_loadu_ps(&line[j]), inverse,
                                                           _mm256_loadu_ps(sums + j)));
            for (; j < seen; ++j) sums[j] += line[j] * _mm256_cvtss_f32(inverse);
        }
        return static_cast<int>(kDone);
    };
    return run_jobs(heads, threads, heads * rows * keys / 16, work);
}
