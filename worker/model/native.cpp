/* Paged attention of a compiled build, in C++; worker/model/attention.py is its reference.
 *
 * Each (token, head) is computed by itself: scores in order of position, sixteen a vector, lane
 * = position mod 16; maximum, exponentials and sum by lanes, joined by one fixed tree; P.V one
 * position after the other. So bits depend on the token's own positions alone, and nothing
 * beyond them is read: the pool may hold NaN there.
 *
 * Types are GCC vectors: the compiler lowers them to what the processor has.
 */
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

typedef float f16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u16v __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16v __attribute__((vector_size(32), aligned(2), may_alias));

namespace {

constexpr int LANES = 16, MAX_PARTS = 16; // a head is at most 256 wide

struct Args {
    const void *query, *key, *value; // [heads][tokens][head_dim], strides below
    void *output;                    // [tokens][num_heads][head_dim]
    void *pool;                      // K of block 0, head 0 of this layer
    const int32_t *tables;           // [rows][table_width] block ids
    const int32_t *token_rows;       // [tokens]
    const int32_t *positions;        // [tokens]
    float *scratch;                  // [threads][scratch_stride]
    int64_t query_head_stride, query_token_stride;
    int64_t key_head_stride, key_token_stride;
    int64_t value_head_stride, value_token_stride;
    int64_t block_stride; // elements between blocks
    int64_t table_width, scratch_stride;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
    int64_t num_keys; // of all tokens and heads together: how much work there is
    int64_t window;   // 0: none
    double scaling, softcap;
};

inline f16v load(const uint16_t *from) {
    return (f16v)(__builtin_convertvector(*(const h16v *)from, u16v) << 16);
}

inline f16v load(const float *from) { return *(const f16v *)from; }

inline void store(uint16_t *to, f16v x) {
    u16v bits = (u16v)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; // to nearest, ties to even
    *(h16v *)to = __builtin_convertvector(bits, h16v);
}

inline void store(float *to, f16v x) { *(f16v *)to = x; }

inline float sum_lanes(f16v x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return x[0];
}

inline float max_lanes(f16v x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2] (Cephes' coefficients); 0 below -87.
inline f16v exp_lanes(f16v x) {
    const f16v zero = {}, least = zero - 87.0f;
    const auto tiny = x < least;
    x = tiny ? least : x;
    const i16v n = __builtin_convertvector(x * 1.44269504f - 0.5f, i16v);
    const f16v f = __builtin_convertvector(n, f16v);
    const f16v r = (x - f * 0.693359375f) - f * -2.12194440e-4f;
    f16v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return tiny ? zero : p * (f16v)((n + 127) << 23);
}

// Keys [low, high) of the sixteen from `at` on that a query at `last` sees.
struct Span {
    int low, high;
    Span(int64_t at, int64_t first, int64_t last)
        : low(at < first ? (int)(first - at) : 0),
          high(last - at < LANES ? (int)(last - at + 1) : LANES) {}
};

template <typename T, int FIXED>
inline void attend_one(const Args &a, int64_t token, int64_t head, float *scores) {
    const int parts = FIXED ? FIXED : (int)(a.head_dim / LANES);
    const int64_t kv_head = head / (a.num_heads / a.num_kv_heads);
    const int64_t size = a.block_size, width = parts * LANES;
    const int64_t last = a.positions[token];
    const int64_t first = a.window && last >= a.window ? last - a.window + 1 : 0;
    const int64_t begin = first / LANES * LANES;
    const int32_t *table = a.tables + a.token_rows[token] * a.table_width;
    const T *base = (const T *)a.pool + kv_head * size * width;
    const T *from = (const T *)a.query + head * a.query_head_stride + token * a.query_token_stride;
    const float scaling = (float)a.scaling, softcap = (float)a.softcap;
    const f16v zero = {};
    f16v query[MAX_PARTS], most = zero - INFINITY;
    for (int j = 0; j < parts; j++) query[j] = load(from + j * LANES);
    for (int64_t at = begin; at <= last; at += LANES) {
        const T *keys = base + table[at / size] * a.block_stride + at % size * width;
        const Span span(at, first, last);
        f16v found = zero - INFINITY;
        for (int i = span.low; i < span.high; i++) {
            f16v dot = query[0] * load(keys + i * width);
            for (int j = 1; j < parts; j++) dot += query[j] * load(keys + i * width + j * LANES);
            float score = sum_lanes(dot) * scaling;
            if (softcap != 0) score = softcap * std::tanh(score / softcap);
            found[i] = score;
        }
        most = found > most ? found : most;
        *(f16v *)(scores + at) = found;
    }
    const float top = max_lanes(most);
    f16v total = zero, result[MAX_PARTS];
    for (int j = 0; j < parts; j++) result[j] = zero;
    for (int64_t at = begin; at <= last; at += LANES) {
        const T *values = base + table[at / size] * a.block_stride + at % size * width +
                          a.num_kv_heads * size * width;
        const f16v weights = exp_lanes(*(const f16v *)(scores + at) - top);
        total += weights;
        const Span span(at, first, last);
        float weight[LANES];
        std::memcpy(weight, &weights, sizeof weight);
        for (int i = span.low; i < span.high; i++)
            for (int j = 0; j < parts; j++)
                result[j] += weight[i] * load(values + i * width + j * LANES);
    }
    const float sum = sum_lanes(total);
    T *to = (T *)a.output + (token * a.num_heads + head) * width;
    for (int j = 0; j < parts; j++) store(to + j * LANES, result[j] / sum);
}

template <typename T> void write(const Args &a) {
    const int64_t size = a.block_size, width = a.head_dim, bytes = width * sizeof(T);
    for (int64_t token = 0; token < a.num_tokens; token++) {
        const int64_t at = a.positions[token];
        const int32_t *table = a.tables + a.token_rows[token] * a.table_width;
        T *block = (T *)a.pool + table[at / size] * a.block_stride;
        const T *key = (const T *)a.key + token * a.key_token_stride;
        const T *value = (const T *)a.value + token * a.value_token_stride;
        for (int64_t head = 0; head < a.num_kv_heads; head++) {
            T *to = block + (head * size + at % size) * width;
            std::memcpy(to, key + head * a.key_head_stride, bytes);
            std::memcpy(to + a.num_kv_heads * size * width, value + head * a.value_head_stride,
                        bytes);
        }
    }
}

// Write the tokens' K and V, then attend.
template <typename T> void attend(const Args &a) {
    write<T>(a);
    const int64_t count = a.num_tokens * a.num_heads;
#pragma omp parallel for schedule(dynamic, 3) if (a.num_keys > 2000)
    for (int64_t i = 0; i < count; i++) {
        float *scores = a.scratch + omp_get_thread_num() * a.scratch_stride;
        const int64_t token = i / a.num_heads, head = i % a.num_heads;
        if (a.head_dim == 64)
            attend_one<T, 4>(a, token, head, scores);
        else if (a.head_dim == 128)
            attend_one<T, 8>(a, token, head, scores);
        else
            attend_one<T, 0>(a, token, head, scores);
    }
}

} // namespace

extern "C" void nightjar_attend_bfloat16(const Args *a) { attend<uint16_t>(*a); }
extern "C" void nightjar_attend_float32(const Args *a) { attend<float>(*a); }
