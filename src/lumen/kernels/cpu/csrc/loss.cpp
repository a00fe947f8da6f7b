// Cross-entropy of a linear head over rows whose logits exist in bf16 only, a chunk of rows at a time.
//
//     z = h Wᵀ,  loss = Σ log Σ e^z - z[target],  dh = (softmax(z) - onehot) W
//
// The logits round to bf16, as the model's own head rounds them; the softmax is fp32.  A row of logits is overwritten by
// e = exp(z - max), unnormalised, with e - Σ e at the target: dh is e W, divided by Σ e when its fp32 sums are whole.
// W is packed a few megabytes at a time, once for the product and once, by pairs of words, for the gradient.
#include "tiles.h"

#include <cmath>

namespace {

constexpr int64_t DEPTH = 2048;  // words of the vocabulary in one product of the gradient

// z [words] → e in place; returns the loss, sets 1 / Σ e and whether the target is a largest logit
float softmax_row(bf16* z, int64_t words, int64_t target, float scale, float* inverse, int64_t* right) {
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t v = 0; v < words; v += 16) {
        const __mmask16 m = first(words - v);
        top = _mm512_mask_max_ps(top, m, top, load_bf16(z + v, m));
    }
    const uint32_t bits = (uint32_t)z[target] << 16;
    float chosen;
    std::memcpy(&chosen, &bits, 4);
    const float best = _mm512_reduce_max_ps(top);
    *right = chosen >= best;
    const __m512 shift = _mm512_set1_ps(best * scale), factor = _mm512_set1_ps(scale);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t v = 0; v < words; v += 16) {
        const __mmask16 m = first(words - v);
        const __m512 e = _mm512_maskz_mov_ps(m, exp512(_mm512_fmsub_ps(load_bf16(z + v, m), factor, shift)));
        sum = _mm512_add_ps(sum, e);
        store_bf16(z + v, e, m);
    }
    const float total = _mm512_reduce_add_ps(sum), exponent = chosen * scale - best * scale;
    const __m512 slope = _mm512_set1_ps(std::exp(exponent) - total);
    store_bf16(z + target, slope, 1);
    *inverse = 1.0f / total;
    return std::log(total) - exponent;
}

}  // namespace

// hidden [M, D], weight [V, D] bf16 (D, V even), targets [M]; z: room for [M, stride] bf16, stride >= V even;
// sums: room for [M, up(D, 48)] fp32; scale > 0.  loss [M] fp32 and right [M] are written, and dh [M, D] bf16 where it is not null.
EXPORT void lumen_linear_loss(const bf16* hidden, const bf16* weight, const int64_t* targets, bf16* z, float* sums,
                              float* loss, int64_t* right, bf16* dh, const int64_t* sizes, float scale) {
    const int64_t M = sizes[0], V = sizes[1], D = sizes[2], stride = sizes[3], wide = up(D, PW);
    const int64_t num = (V + PW - 1) / PW, group = min64(num, group_of(D / 2));
    static thread_local Scratch memory;
    Carve carve{static_cast<char*>(memory.get(max64(group * D / 2 * PW * 4, DEPTH / 2 * wide * 4) + M * 4 + 256))};
    uint32_t* packed = carve.take<uint32_t>(max64(group * D / 2 * PW, DEPTH / 2 * wide));
    float* inverse = carve.take<float>(M);
#pragma omp parallel
    {
        for (int64_t g = 0; g < num; g += group) {
            const int64_t to = min64(num, g + group);
#pragma omp for schedule(dynamic)
            for (int64_t p = g; p < to; ++p)
                pack_rows((const char*)(weight + p * PW * D), 2 * D, V - p * PW, D / 2, PW, packed + (p - g) * D / 2 * PW);
            panels({(const char*)hidden, 2 * D, D / 2}, {nullptr, 0, 0}, packed, g, to, M, nullptr, z, stride, V);
        }
#pragma omp for schedule(dynamic)
        for (int64_t m = 0; m < M; ++m)
            loss[m] = softmax_row(z + m * stride, V, targets[m], scale, inverse + m, right + m);
        if (dh != nullptr) {
            const int64_t task = task_rows(M);
            for (int64_t v = 0; v < V; v += DEPTH) {
                const int64_t depth = min64(DEPTH, V - v), words = (depth + 1) / 2;
#pragma omp for schedule(dynamic)
                for (int64_t d = 0; d < wide; d += PW)
                    pack_pairs(weight + v * D + d, D, depth, D - d, PW, packed + d * words);
#pragma omp for schedule(dynamic)
                for (int64_t m = 0; m < M; m += task)
                    for (int64_t d = 0; d < wide; d += PW)
                        product(NV, (const char*)(z + m * stride + v), 2 * stride, 4, packed + d * words, words,
                                sums + m * wide + d, wide, min64(task, M - m), v > 0);
            }
#pragma omp for
            for (int64_t m = 0; m < M; ++m)
                for (int64_t d = 0; d < D; d += 16)
                    store_bf16(dh + m * D + d, _mm512_mul_ps(_mm512_loadu_ps(sums + m * wide + d),
                                                             _mm512_set1_ps(inverse[m] * scale)), first(D - d));
        }
    }
}
