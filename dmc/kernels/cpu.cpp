// Kernels of the CPU backend. Data layouts are those of dmc/kernels/base.py, the specification is reference.py.
// Vectors are the compiler's own (gcc and clang), so the code holds for every instruction set.
// The last six flags are what -ffast-math stands for; by that name, gcc < 13 lets the library turn subnormals into 0 in the
// whole process. cpu_build.py and setup.py read them here.
// flags: -std=c++17 -O3 -fPIC -shared -fno-math-errno -ffinite-math-only -fno-signed-zeros -fno-trapping-math -fassociative-math -freciprocal-math

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, ROWS = 4;
#else
constexpr int LANES = 4, ROWS = 2;
#endif
constexpr int KEYS = 4;         // of one step of the score kernel; with ROWS query rows its sums fill the registers
constexpr int VECTORS = 4;      // of one step of the value kernel
constexpr int SPAN = VECTORS * LANES;
constexpr int TILE = 64;        // slots between two updates of the softmax
constexpr int MAX_DIM = 256;    // stated in cpu.py too
constexpr int BLOCK_ROWS = 64;  // query rows that share a tile: the queries of a block times the group
constexpr int BAND_QUERIES = 16;  // that share a tile of a band
constexpr int LINE = 64;        // bytes of a cache line
constexpr int MIN_CHUNK = 256;  // slots worth a task of their own
constexpr int CHUNKS_PER_THREAD = 8;
constexpr int64_t MIN_PARALLEL_WORK = 1 << 17;  // multiplications; below it, waking threads costs more than it saves

// -ffinite-math-only knows no infinity. A masked score lies so far below the lowest maximum that its weight is exactly 0.
constexpr float MASKED = -1e30f, LOWEST_MAXIMUM = -1e20f;
constexpr float LOG2_E = 1.4426950408889634f;

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

struct BFloat16 {
    uint16_t bits;
};

inline Vec load(const float* from) { return *reinterpret_cast<const Vec*>(from); }
inline Vec load(const BFloat16* from) {
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16);
}
inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)  // gcc 12 widens to 32 bits lane by lane
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints), Vec);
#endif
}
inline void store(float* to, Vec values) { *reinterpret_cast<Vec*>(to) = values; }
inline Bits rounded(Vec values) {  // to bfloat16 in the upper half of each lane: to nearest, ties to even
    const Bits bits = (Bits)values;
    return bits + 0x7fff + ((bits >> 16) & 1);
}
inline void store(BFloat16* to, Vec values) {
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(rounded(values) >> 16, Halves);
}

// Attention works on channels in the order of unpack<P>, P what the pages hold. In bfloat16 these are the even ones of a
// pair of vectors, which take an operation each, then the odd ones. It is the same for queries, keys and values; pack<P>
// puts the output back in order.
template <class P, class T>
inline void unpack(const T* from, int dim, float* to) {
    int d = 0;
    if constexpr (std::is_same_v<P, BFloat16>)
        for (; d + 2 * LANES <= dim; d += 2 * LANES) {
            const Bits pairs = *reinterpret_cast<const Bits*>(from + d);
            store(to + d, (Vec)(pairs << 16));
            store(to + d + LANES, (Vec)(pairs & 0xffff0000u));
        }
    for (; d < dim; d += LANES) store(to + d, load(from + d));
}
template <class P, class T>
inline void pack(const float* from, int dim, T* to) {
    int d = 0;
    if constexpr (std::is_same_v<P, BFloat16>)
        for (; d + 2 * LANES <= dim; d += 2 * LANES)
            *reinterpret_cast<Bits*>(to + d) =
                rounded(load(from + d)) >> 16 | (rounded(load(from + d + LANES)) & 0xffff0000u);
    for (; d < dim; d += LANES) store(to + d, load(from + d));
}
inline void scale(float* values, int dim, float factor) {
    for (int d = 0; d < dim; d += LANES) store(values + d, load(values + d) * factor);
}

// values[i] *= factors[i], for as many whole vectors as it takes.
inline void multiply(float* values, const float* factors, int count) {
    for (int i = 0; i < count; i += LANES) store(values + i, load(values + i) * load(factors + i));
}

template <class P>
constexpr bool is_8_bit = std::is_same_v<P, int8_t>;

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

constexpr int LARGEST = 127;  // of an 8-bit page, as in pages.py

// Rounds channels to 8 bits and returns their factor. Magnitudes are compared as integers, which order floats alike and put
// what is not finite above all others: the factor is then not finite either.
inline float quantize(const float* from, int dim, int8_t* to) {
    Ints largest = {};
    for (int d = 0; d < dim; d += LANES) {
        const Ints magnitude = (Ints)load(from + d) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = std::max(bits, int32_t(largest[i]));
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(float));
    const float inverse = bits > 0 ? LARGEST / magnitude : 0;
    for (int d = 0; d < dim; d += LANES) {
        const Vec steps = load(from + d) * inverse;
        const Ints integers = __builtin_convertvector(steps + (steps > 0.0f ? Vec{} + 0.5f : Vec{} - 0.5f), Ints);
        *reinterpret_cast<Bytes*>(to + d) = __builtin_convertvector(integers, Bytes);
    }
    return magnitude / LARGEST;
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

template <int STEP, int... I>
inline Vec exchanged(Vec values, std::integer_sequence<int, I...>) {
    return SHUFFLE(values, values, (I ^ STEP)...);
}

template <int STEP = LANES / 2>
inline float max_of(Vec values) {
    if constexpr (STEP == 0)
        return values[0];
    else
        return max_of<STEP / 2>(larger(values, exchanged<STEP>(values, std::make_integer_sequence<int, LANES>())));
}

template <int STEP = LANES / 2>
inline float sum_of(Vec values) {
    if constexpr (STEP == 0)
        return values[0];
    else
        return sum_of<STEP / 2>(values + exchanged<STEP>(values, std::make_integer_sequence<int, LANES>()));
}

// Lane i: a[i] + a[i ^ STEP] where i & STEP is 0, the same of b elsewhere.
template <int STEP, int... I>
inline Vec add_neighbors(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return SHUFFLE(a, b, (I & STEP ? LANES + I : I)...) +
           SHUFFLE(a, b, (I & STEP ? LANES + (I ^ STEP) : (I ^ STEP))...);
}

// Lane i: the sum of values[i].
template <int STEP = 1>
inline Vec sums_of(const Vec* values) {
    if constexpr (STEP == LANES) {
        return values[0];
    } else {
        Vec halved[LANES / STEP / 2];
        for (int i = 0; i < LANES / STEP / 2; i++)
            halved[i] = add_neighbors<STEP>(values[2 * i], values[2 * i + 1], std::make_integer_sequence<int, LANES>());
        return sums_of<2 * STEP>(halved);
    }
}

// 2^x for x <= 0, to a few ulp; exactly 0 from -127 down.
inline Vec exp2_of(Vec x) {
    x = larger(x, Vec{} - 127.0f);
    Ints integers = __builtin_convertvector(x - 0.5f, Ints);  // truncation makes this round to nearest
    Vec f = x - __builtin_convertvector(integers, Vec);
    Vec power = 1.32764713e-3f * f + 9.67554189e-3f;  // minimax on [-1/2, 1/2]
    power = power * f + 5.55071309e-2f;
    power = power * f + 2.40221202e-1f;
    power = power * f + 6.93146944e-1f;
    power = power * f + 1.0f;
    return power * (Vec)((integers + 127) << 23);
}

inline float exp2_of(float x) { return exp2_of(Vec{} + x)[0]; }

// GOMP_parallel of the OpenMP runtime that torch has loaded (gcc's, LLVM's and Intel's offer it): one pool of threads
// for both, whatever compiler built this file. Null: one thread.
typedef void (*ForkJoin)(void (*)(void*), void*, unsigned, unsigned);
ForkJoin fork_join = nullptr;

// Runs work() on every thread of the pool; the threads share out what there is to do by a counter.
template <class Work>
void on_threads(int64_t threads, const Work& work) {
    if (threads <= 1 || fork_join == nullptr) return work();
    // The number of threads is always the pool's: asking for fewer would make the runtime end and restart threads.
    fork_join([](void* data) { (*static_cast<const Work*>(data))(); }, const_cast<Work*>(&work), unsigned(threads), 0);
}

}  // namespace

// Tensors by address; steps count elements. Calls in cpu.py give the fields of each structure in order, 8 bytes each.
struct Attention {
    int64_t sequences, kv_heads, group, dim, block, threads;
    double scaling;
    const int64_t* starts;  // where the queries of each sequence begin, and the end, [S + 1]; null: one of each
    const void* query;      // [T, H_q, D]
    int64_t query_step, query_head_step;
    const void *key_pages, *value_pages;    // [N, block, D]
    const float *key_scales, *value_scales;  // [N, block], factors of 8-bit pages
    const float* bias;                    // [N, block], added to the scores of slots, or null
    const int64_t* rows;                  // [S]; null: sequence s has row s
    const int32_t* tables;                // [C, H, M]
    int64_t table_row_step, table_head_step;
    const int32_t* slots;  // seen by each query: [T, H], or [C, H] by cache row
    int64_t slots_by_row;
    const void *top_key, *top_value;  // [T, H, D] or null
    const bool* top_exists;           // [T]
    const void *recent_key, *recent_value;  // [T + S (W - 1), H, D] or null: W - 1 more of each sequence
    const bool* recent_exists;              // [T + S (W - 1)]
    int64_t delay;
    void* out;      // [T, H_q, D]
    float* scores;  // [S, H_q, scores_step], zeros, or null; one query of each sequence
    int64_t scores_step;
    float* lse;                   // log of the sum of exp of each query's scores, [T, H_q], or null
    int64_t num_rows, num_slots;  // C, and the slots that a table can name
    const float* sinks;           // logit that each query head's softmax counts besides, [H_q], or null

    int64_t start(int64_t sequence) const { return starts ? starts[sequence] : sequence; }
    int64_t queries(int64_t sequence) const { return starts ? starts[sequence + 1] - starts[sequence] : 1; }
    int64_t seen(int64_t sequence, int64_t head, int64_t query) const {
        const int64_t place = slots_by_row ? (rows ? rows[sequence] : sequence) : start(sequence) + query;
        return slots[place * kv_heads + head];
    }
};

namespace {

template <class E>
struct Tile {
    const E* key[TILE];
    const E* value[TILE];
    float key_scale[TILE], value_scale[TILE];  // of 8-bit pages
    float bias[TILE];                          // of slots, where there is one
    int count;

    void pad() {  // the score kernel takes KEYS at a time, and fetching looks as far as the tile before it is long
        if (count > 0) std::fill(key + count, key + TILE, key[count - 1]);
    }
};

// A block of queries of one KV head, all query heads of its group, against some of the slots.
struct Task {
    int64_t sequence, head, first_query, queries, begin, end;
    int64_t unit;     // tasks over other slots of the same queries have the same unit
    int64_t partial;  // where the state goes in the workspace, or -1: there is only this task
};

// Raw tokens beside the slots: query i sees those of i..i + width - 1 that exist.
template <class T>
struct Band {
    const T *key, *value;
    int64_t step, width, first;  // first: how many of them, from the beginning, do not exist

    static Band make(const void* key, const void* value, const bool* exists, const Task& task, int64_t width,
                     const Attention& a) {
        const int64_t begin = a.start(task.sequence) + task.sequence * (width - 1), step = a.kv_heads * a.dim;
        const int64_t length = a.queries(task.sequence) + width - 1, offset = begin * step + task.head * a.dim;
        const int64_t first = std::find(exists + begin, exists + begin + length, true) - (exists + begin);
        return {static_cast<const T*>(key) + offset, static_cast<const T*>(value) + offset, step, width, first};
    }
};

template <class T>
void prefetch(const T* const* rows, int count, int dim) {
    for (int j = 0; j < count; j++)
        for (int i = 0; i < dim; i += LINE / sizeof(T)) __builtin_prefetch(rows[j] + i);
}

// scores[r][j] = query[r] . keys[j]
template <int R>
void score(const float* query, const float* const* keys, int dim, float* scores) {
    constexpr int SUMS = (R * KEYS + LANES - 1) / LANES * LANES;
    Vec sums[SUMS] = {};  // the last ones stay 0 where R * KEYS are no whole vector
    for (int d = 0; d < dim; d += LANES) {
        Vec q[R];
        for (int r = 0; r < R; r++) q[r] = load(query + r * dim + d);
        for (int j = 0; j < KEYS; j++) {
            const Vec key = load(keys[j] + d);
            for (int r = 0; r < R; r++) sums[r * KEYS + j] += q[r] * key;
        }
    }
    float summed[SUMS];
    for (int i = 0; i < SUMS; i += LANES) store(summed + i, sums_of(sums + i));
    for (int r = 0; r < R; r++) std::memcpy(scores + r * TILE, summed + r * KEYS, KEYS * sizeof(float));
}

// out[r] += sum over j of weights[r][j] values[j], for V vectors of channels; meanwhile fetches those of ahead[j]
template <int R, int V, class T>
void add_values(const float* weights, const float* const* values, const T* const* ahead, int count, int channel,
                int dim, float* out) {
    Vec sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = load(out + r * dim + v * LANES);
    for (int j = 0; j < count; j++) {
        if (ahead)
            for (size_t i = 0; i < V * LANES; i += LINE / sizeof(T)) __builtin_prefetch(ahead[j] + channel + i);
        Vec value[V];
        for (int v = 0; v < V; v++) value[v] = load(values[j] + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sums[r][v] += weights[r * TILE + j] * value[v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(out + r * dim + v * LANES, sums[r][v]);
}

// Points to some channels of rows in float32; others are first copied to scratch.
template <class P, class E>
inline void widen(const E* const* from, int count, int channel, int width, float* scratch, const float** to) {
    for (int j = 0; j < count; j++, scratch += width) {
        if constexpr (std::is_same_v<E, float>) {
            to[j] = from[j] + channel;
        } else {
            unpack<P>(from[j] + channel, width, scratch);
            to[j] = scratch;
        }
    }
}

// The online softmax of the rows of a task (row = query * group + member), and the scratch memory of a thread. T: queries,
// raw tokens and outputs, P: pages.
template <class T, class P>
class Rows {
  public:
    Rows(const Attention& a, int64_t most_queries)
        : a_(a), dim_(int(a.dim)), size_(int(most_queries * a.group)), query_(size_ * dim_), out_(size_ * dim_),
          scores_(size_ * TILE), maximum_(size_), sum_(size_), limit_(size_) {}

    void run(const Task& task) {
        begin(task);
        const int64_t row = a_.rows ? a_.rows[task.sequence] : task.sequence;
        const int32_t* table = a_.tables + row * a_.table_row_step + task.head * a_.table_head_step;
        Tile<P> tile, next;
        int64_t start = task.begin;
        fill(next, table, start, task.end);
        for (; start < task.end; start += tile.count) {
            tile = next;
            fill(next, table, start + tile.count, task.end);
            if (a_.scores) raw_scores_ = score_row(task, 0) + start;
            const auto seen = [&](int r) { return int(std::min<int64_t>(limit_[r] - start, tile.count)); };
            attend(tile, next, a_.bias ? tile.bias : nullptr, 0, rows_, [](int) { return 0; }, seen);
        }
        raw_scores_ = nullptr;
        if (task.begin > 0) return;
        if (a_.top_key) attend(Band<T>::make(a_.top_key, a_.top_value, a_.top_exists, task, 1, a_), task);
        if (a_.recent_key)
            attend(Band<T>::make(a_.recent_key, a_.recent_value, a_.recent_exists, task, a_.delay, a_), task);
    }

    void save(float* partial) const {
        for (int r = 0; r < rows_; r++, partial += dim_ + 2) {
            partial[0] = maximum_[r], partial[1] = sum_[r];
            std::copy_n(&out_[r * dim_], dim_, partial + 2);
        }
    }

    void merge(const float* partial) {
        for (int r = 0; r < rows_; r++, partial += dim_ + 2) {
            const float highest = std::max(maximum_[r], partial[0]);
            const float mine = exp2_of(maximum_[r] - highest), other = exp2_of(partial[0] - highest);
            maximum_[r] = highest;
            sum_[r] = mine * sum_[r] + other * partial[1];
            for (int d = 0; d < dim_; d++) out_[r * dim_ + d] = mine * out_[r * dim_ + d] + other * partial[2 + d];
        }
    }

    void finish(const Task& task) {
        for (int r = 0; r < rows_; r++) {
            const float inverse = sum_[r] > 0 ? 1 / sum_[r] : 0;
            const int64_t head = task.head * a_.group + r % a_.group;
            const int64_t query = a_.start(task.sequence) + task.first_query + r / a_.group;
            const int64_t place = query * a_.kv_heads * a_.group + head;
            scale(&out_[r * dim_], dim_, inverse);
            pack<P>(&out_[r * dim_], dim_, static_cast<T*>(a_.out) + place * dim_);
            if (a_.lse) a_.lse[place] = maximum_[r] / LOG2_E + std::log(sum_[r]);
            if (!a_.scores) continue;
            float* scores = score_row(task, r);
            int64_t j = 0;
            for (; j + LANES <= limit_[r]; j += LANES)
                store(scores + j, inverse * exp2_of(load(scores + j) - maximum_[r]));
            for (; j < limit_[r]; j++) scores[j] = inverse * exp2_of(scores[j] - maximum_[r]);
        }
    }

  private:
    void begin(const Task& task) {
        rows_ = int(task.queries * a_.group);
        const float scaling = float(a_.scaling) * LOG2_E;  // the softmax is taken to the base 2
        for (int r = 0; r < rows_; r++) {
            const int64_t head = task.head * a_.group + r % a_.group, query = task.first_query + r / a_.group;
            const T* from = static_cast<const T*>(a_.query) + (a_.start(task.sequence) + query) * a_.query_step +
                            head * a_.query_head_step;
            unpack<P>(from, dim_, &query_[r * dim_]);
            scale(&query_[r * dim_], dim_, scaling);
            limit_[r] = a_.seen(task.sequence, task.head, query);
            const bool has_sink = a_.sinks && task.begin == 0;  // a key whose value is 0
            maximum_[r] = has_sink ? a_.sinks[head] * LOG2_E : LOWEST_MAXIMUM;
            sum_[r] = has_sink ? 1.0f : 0.0f;
        }
        std::fill_n(out_.begin(), rows_ * dim_, 0.0f);
    }

    float* score_row(const Task& task, int r) const {
        return a_.scores + ((task.sequence * a_.kv_heads + task.head) * a_.group + r) * a_.scores_step;
    }

    void fill(Tile<P>& tile, const int32_t* table, int64_t start, int64_t end) const {
        tile.count = int(std::clamp<int64_t>(end - start, 0, TILE));
        for (int j = 0; j < tile.count;) {
            const int64_t offset = (start + j) % a_.block;
            int64_t place = table[(start + j) / a_.block] * a_.block + offset;
            const int stop = int(std::min<int64_t>(tile.count, j + a_.block - offset));
            if constexpr (is_8_bit<P>) {
                std::copy_n(a_.key_scales + place, stop - j, tile.key_scale + j);
                std::copy_n(a_.value_scales + place, stop - j, tile.value_scale + j);
            }
            if (a_.bias) std::copy_n(a_.bias + place, stop - j, tile.bias + j);
            for (place *= dim_; j < stop; j++, place += dim_) {
                tile.key[j] = static_cast<const P*>(a_.key_pages) + place;
                tile.value[j] = static_cast<const P*>(a_.value_pages) + place;
            }
        }
        tile.pad();
    }

    // Few queries at a time: each tile of a band is seen in part only.
    void attend(const Band<T>& band, const Task& task) {
        const int64_t last = task.first_query + task.queries;
        Tile<T> tile, none;
        none.count = 0;
        for (int64_t query = task.first_query; query < last; query += BAND_QUERIES) {
            const int64_t stop = std::min(query + BAND_QUERIES, last), end = stop + band.width - 1;
            for (int64_t start = std::max(query, band.first); start < end; start += TILE) {
                tile.count = int(std::min<int64_t>(end - start, TILE));
                for (int j = 0; j < tile.count; j++) {
                    tile.key[j] = band.key + (start + j) * band.step;
                    tile.value[j] = band.value + (start + j) * band.step;
                }
                tile.pad();
                const auto from = [&](int r) { return int(task.first_query + r / a_.group - start); };
                attend(tile, none, nullptr, int((query - task.first_query) * a_.group),
                       int((stop - task.first_query) * a_.group), [&](int r) { return std::max(from(r), 0); },
                       [&](int r) { return int(std::min<int64_t>(from(r) + band.width, tile.count)); });
            }
        }
    }

    // Row r sees tile entries from(r)..to(r) - 1. Meanwhile the tile's values and the next tile's keys are fetched.
    template <class E, class From, class To>
    void attend(const Tile<E>& tile, const Tile<E>& next, const float* bias, int first, int last, From from, To to) {
        alignas(LINE) float wide[std::max(KEYS * MAX_DIM, TILE * SPAN)];
        for (int j = 0; j < tile.count; j += KEYS) {
            const float* key[KEYS];
            prefetch(tile.value + j, std::min(KEYS, tile.count - j), dim_);
            widen<P>(tile.key + j, KEYS, 0, dim_, wide, key);
            int r = first;
            for (; r + ROWS <= last; r += ROWS) score<ROWS>(&query_[r * dim_], key, dim_, &scores_[r * TILE + j]);
            for (; r < last; r++) score<1>(&query_[r * dim_], key, dim_, &scores_[r * TILE + j]);
        }
        if constexpr (is_8_bit<E>)
            for (int r = first; r < last; r++) multiply(&scores_[r * TILE], tile.key_scale, tile.count);
        if (bias)
            for (int r = first; r < last; r++)
                for (int j = 0; j < tile.count; j++) scores_[r * TILE + j] += bias[j] * LOG2_E;
        if (raw_scores_)
            for (int r = first; r < last; r++)
                std::copy_n(&scores_[r * TILE], tile.count, raw_scores_ + r * a_.scores_step);
        for (int r = first; r < last; r++) {
            weigh(r, from(r), to(r), tile.count);
            if constexpr (is_8_bit<E>) multiply(&scores_[r * TILE], tile.value_scale, tile.count);
        }
        int channel = 0;
        for (; channel + SPAN <= dim_; channel += SPAN) add<VECTORS>(tile, next, first, last, channel, wide);
        for (; channel < dim_; channel += 2 * LANES) {
            if (dim_ - channel >= 2 * LANES)
                add<2>(tile, next, first, last, channel, wide);
            else
                add<1>(tile, next, first, last, channel, wide);
        }
    }

    // The part of `attend` that follows the weights, for V vectors of channels.
    template <int V, class E>
    void add(const Tile<E>& tile, const Tile<E>& next, int first, int last, int channel, float* wide) {
        const float* value[TILE];
        widen<P>(tile.value, tile.count, channel, V * LANES, wide, value);
        const E* const* ahead = next.count > 0 ? next.key : nullptr;
        int r = first;
        for (; r + ROWS <= last; r += ROWS, ahead = nullptr)
            add_values<ROWS, V>(&scores_[r * TILE], value, ahead, tile.count, channel, dim_, &out_[r * dim_ + channel]);
        for (; r < last; r++, ahead = nullptr)
            add_values<1, V>(&scores_[r * TILE], value, ahead, tile.count, channel, dim_, &out_[r * dim_ + channel]);
    }

    // Turns the scores of a row into weights relative to the new maximum.
    void weigh(int r, int from, int to, int count) {
        float* scores = &scores_[r * TILE];
        const int padded = (count + LANES - 1) / LANES * LANES;
        for (int j = 0; j < std::min(from, padded); j++) scores[j] = MASKED;
        for (int j = std::max(to, 0); j < padded; j++) scores[j] = MASKED;
        Vec highest = Vec{} + maximum_[r];
        for (int j = 0; j < padded; j += LANES) highest = larger(highest, load(scores + j));
        const float maximum = max_of(highest);
        if (maximum > maximum_[r]) {
            const float shrink = exp2_of(maximum_[r] - maximum);
            scale(&out_[r * dim_], dim_, shrink);
            sum_[r] *= shrink;
            maximum_[r] = maximum;
        }
        Vec sum = {};
        for (int j = 0; j < padded; j += LANES) {
            const Vec weights = exp2_of(load(scores + j) - maximum);
            store(scores + j, weights);
            sum += weights;
        }
        sum_[r] += sum_of(sum);
    }

    const Attention& a_;
    const int dim_, size_;
    int rows_ = 0;
    std::vector<float> query_, out_, scores_, maximum_, sum_;
    std::vector<int64_t> limit_;
    float* raw_scores_ = nullptr;
};

inline int64_t most_queries(const Attention& a) {
    int64_t most = 0;
    for (int64_t sequence = 0; sequence < a.sequences; sequence++) most = std::max(most, a.queries(sequence));
    return most;
}

// Cuts the work into tasks: late queries, which see most, come first; long heads are cut so that every thread has some.
inline std::vector<Task> plan(const Attention& a, int64_t block_queries) {
    std::vector<Task> units, tasks;
    int64_t total = 0;
    for (int64_t behind = 0; behind < most_queries(a); behind += block_queries)
        for (int64_t sequence = 0; sequence < a.sequences; sequence++)
            for (int64_t head = 0; head < a.kv_heads; head++) {
                const int64_t last = a.queries(sequence) - behind, first = std::max<int64_t>(last - block_queries, 0);
                if (last <= 0) break;
                int64_t most = 0;
                for (int64_t query = first; query < last; query++)
                    most = std::max(most, a.seen(sequence, head, query));
                units.push_back({sequence, head, first, last - first, 0, most, int64_t(units.size()), -1});
                total += most;
            }
    const int64_t share = total / (a.threads * CHUNKS_PER_THREAD) / TILE * TILE;
    const int64_t chunk = a.threads == 1 ? std::max<int64_t>(total, 1) : std::max<int64_t>(share, MIN_CHUNK);
    int64_t num_partials = 0;
    for (Task task : units) {
        const int64_t end = task.end, count = std::max<int64_t>(end / chunk, 1);
        for (int64_t i = 0; i < count; i++) {
            task.begin = end * i / count, task.end = end * (i + 1) / count;
            task.partial = count > 1 ? num_partials++ : -1;
            tasks.push_back(task);
        }
    }
    return tasks;
}

template <class T, class P>
void attend(const Attention& a) {
    const int64_t block_queries = std::clamp<int64_t>(BLOCK_ROWS / a.group, 1, std::max<int64_t>(most_queries(a), 1));
    const std::vector<Task> tasks = plan(a, block_queries);
    const int64_t num_tasks = int64_t(tasks.size()), stride = block_queries * a.group * (a.dim + 2);
    int64_t num_partials = 0;
    for (const Task& task : tasks) num_partials = std::max(num_partials, task.partial + 1);
    const std::unique_ptr<float[]> partials(new float[num_partials * stride]);
    std::vector<std::atomic<int>> waiting(num_tasks);  // by unit: its tasks that have not finished
    for (const Task& task : tasks) waiting[task.unit]++;
    int64_t work = 0;
    for (const Task& task : tasks) work += (task.end - task.begin + a.delay + 1) * task.queries * a.group * a.dim;
    std::atomic<int64_t> taken{0};
    on_threads(work < MIN_PARALLEL_WORK ? 1 : a.threads, [&] {
        Rows<T, P> rows(a, block_queries);
        for (int64_t i; (i = taken++) < num_tasks;) {
            const Task& task = tasks[i];
            rows.run(task);
            if (task.partial >= 0) {
                rows.save(&partials[task.partial * stride]);
                if (--waiting[task.unit] > 0) continue;
                for (const Task& other : tasks)
                    if (other.unit == task.unit && other.partial != task.partial)
                        rows.merge(&partials[other.partial * stride]);
            }
            rows.finish(task);
        }
    });
}

}  // namespace

// The next tokens of each sequence, side by side in one row.
struct Append {
    int64_t sequences, heads, dim, block, history, delay, threads;
    int64_t gated, merges, window;  // window 0: exact accumulation
    const int64_t* rows;            // [S]
    const int64_t* starts;          // where the tokens of each sequence begin, and the end, [S + 1]
    const int64_t* positions;       // [T], those of a sequence count up
    const void *key, *value;        // [T, H, D]
    int64_t key_step, key_head_step, value_step, value_head_step;
    const bool* decisions;  // [T, H]
    int64_t decisions_step, decisions_head_step;
    const float* omega;  // [T, H]
    int64_t omega_step, omega_head_step;
    const float *cos, *sin;  // [T + S W, D]: at W positions more of each sequence, before its first
    void *key_pages, *value_pages;
    float *key_scales, *value_scales;  // [N, block], factors of 8-bit pages, or null
    const int32_t* free_blocks;
    int32_t* num_free;
    int32_t* tables;  // [C, H, M]
    int64_t table_row_step, table_head_step;
    int32_t* lengths;                    // [C, H]
    void *history_key, *history_value;   // [C, H, R, D]
    bool* history_decisions;             // [C, H, R]
    float* history_omega;                // [C, H, R]
    float *mean, *weight;                // [C, H, 2 D], [C, H]
    int32_t* seen;                       // [T, H]
    void *top_key, *top_value;           // [T, H, D] or null
    bool* top_exists;                    // [T]
    void *recent_key, *recent_value;     // [T + S (W - 1), H, D] or null
    bool* recent_exists;                 // [T + S (W - 1)]
    int64_t num_rows, num_slots;         // C, and the slots that a table can name
};

namespace {

// The head of one sequence that new tokens enter.
template <class T>
class Head {
  public:
    Head(const Append& a, int64_t sequence, int64_t head)
        : a_(a), dim_(int(a.dim)), sequence_(sequence), head_(head), start_(a.starts[sequence]),
          tokens_(a.starts[sequence + 1] - start_), row_(a.rows[sequence] * a.heads + head),
          first_(a.positions[start_]), table_(a.tables + a.rows[sequence] * a.table_row_step + head * a.table_head_step) {}

    // Slots after these tokens.
    int64_t grown() const {
        int64_t length = a_.lengths[row_];
        for (int64_t i = 0; i < tokens_; i++) length += appends(first_ + i - a_.delay);
        return length;
    }

    int64_t length() const { return a_.lengths[row_]; }

    // Takes blocks and says what is seen; heads come in order, for they share the free list.
    void grow() {
        int32_t length = a_.lengths[row_];
        for (int64_t i = 0; i < tokens_; i++) {
            if (appends(first_ + i - a_.delay)) {
                if (length % a_.block == 0) table_[length / a_.block] = a_.free_blocks[--*a_.num_free];
                length++;
            }
            a_.seen[place(i)] = a_.top_key ? std::max(length - 1, 0) : length;
        }
        a_.lengths[row_] = length;
    }

    // Heads are independent of each other.
    void write() {
        for (int64_t i = 0; i < tokens_; i++) enter(i);
        if (a_.delay > 0) recall();
        const int64_t end = first_ + tokens_;  // the history is needed up to here
        for (int64_t position = std::max(first_, end - a_.history); position < end; position++) remember(position);
    }

  private:
    int64_t place(int64_t i) const { return (start_ + i) * a_.heads + head_; }  // of the i-th new token
    bool is_new(int64_t position) const { return position >= first_; }
    int64_t token(int64_t position) const { return start_ + position - first_; }
    int64_t ring(int64_t position) const { return row_ * a_.history + position % a_.history; }
    const T* key(int64_t position) const {
        if (!is_new(position)) return static_cast<const T*>(a_.history_key) + ring(position) * dim_;
        return static_cast<const T*>(a_.key) + token(position) * a_.key_step + head_ * a_.key_head_step;
    }
    const T* value(int64_t position) const {
        if (!is_new(position)) return static_cast<const T*>(a_.history_value) + ring(position) * dim_;
        return static_cast<const T*>(a_.value) + token(position) * a_.value_step + head_ * a_.value_head_step;
    }
    bool decision(int64_t position) const {
        if (!is_new(position)) return a_.history_decisions[ring(position)];
        return a_.decisions[token(position) * a_.decisions_step + head_ * a_.decisions_head_step];
    }
    float omega(int64_t position) const {
        if (!is_new(position)) return a_.history_omega[ring(position)];
        return a_.omega[token(position) * a_.omega_step + head_ * a_.omega_head_step];
    }
    bool merged(int64_t position) const { return position > 0 && decision(position); }  // nothing precedes the first
    bool appends(int64_t position) const { return position >= 0 && !(a_.gated && merged(position)); }

    template <class From, class To>
    void copy(const From* from, To* to) const {
        for (int d = 0; d < dim_; d += LANES) store(to + d, load(from + d));
    }

    // Writes a state into a slot; in 8 bits, the state becomes what is read there again.
    void put(float* state, void* pages, float* scales, int64_t slot) const {
        if (scales == nullptr) return copy(state, static_cast<T*>(pages) + slot * dim_);
        int8_t* page = static_cast<int8_t*>(pages) + slot * dim_;
        scales[slot] = quantize(state, dim_, page);
        for (int d = 0; d < dim_; d += LANES) store(state + d, scales[slot] * load(page + d));
    }

    // sums = old * sums + fresh * from
    void blend(float* sums, float old, float fresh, const T* from) const {
        for (int d = 0; d < dim_; d += LANES) store(sums + d, old * load(sums + d) + fresh * load(from + d));
    }

    // Lets the i-th token that leaves the delay into the stream.
    void enter(int64_t i) {
        const int64_t position = first_ + i - a_.delay;
        float key[MAX_DIM] = {}, value[MAX_DIM] = {};
        if (position < 0 && a_.mean) {
            std::fill_n(a_.mean + row_ * 2 * dim_, 2 * dim_, 0.0f);
            a_.weight[row_] = 0;
        }
        const bool stays = position >= 0 && (a_.merges || appends(position));
        if (stays) {
            state(position, key, value);
            if (a_.gated) rotate(key, i);
            const int64_t slot = a_.seen[place(i)] - (a_.top_key ? 0 : 1);
            const int64_t to = table_[slot / a_.block] * a_.block + slot % a_.block;
            put(key, a_.key_pages, a_.key_scales, to);
            put(value, a_.value_pages, a_.value_scales, to);
        }
        if (a_.top_key) {
            copy(key, static_cast<T*>(a_.top_key) + place(i) * dim_);
            copy(value, static_cast<T*>(a_.top_value) + place(i) * dim_);
            if (head_ == 0) a_.top_exists[start_ + i] = position >= 0;
        }
    }

    // The open slot after the token at this position: key, unrotated, and value.
    void state(int64_t position, float* key_sum, float* value_sum) {
        if (!a_.merges) {
            copy(key(position), key_sum);
            copy(value(position), value_sum);
        } else if (a_.window > 0) {
            int64_t oldest = position;
            float total = omega(position);
            while (merged(oldest) && position - oldest + 1 < a_.window) total += omega(--oldest);
            for (int64_t p = oldest; p <= position; p++) {
                blend(key_sum, 1, omega(p) / total, key(p));
                blend(value_sum, 1, omega(p) / total, value(p));
            }
        } else {
            float* mean = a_.mean + row_ * 2 * dim_;
            const float fresh = omega(position), before = merged(position) ? a_.weight[row_] : 0;
            a_.weight[row_] = before + fresh;
            if (before == 0) std::fill_n(mean, 2 * dim_, 0.0f);
            blend(mean, before / (before + fresh), fresh / (before + fresh), key(position));
            blend(mean + dim_, before / (before + fresh), fresh / (before + fresh), value(position));
            copy(mean, key_sum);
            copy(mean + dim_, value_sum);
        }
    }

    void rotate(float* key, int64_t entry) const {
        const int half = dim_ / 2;
        const int64_t turn = (start_ + sequence_ * a_.delay + entry) * dim_;
        const float *cos = a_.cos + turn, *sin = a_.sin + turn;
        for (int d = 0; d < half; d++) {
            const float first = key[d], second = key[d + half];
            key[d] = first * cos[d] - second * sin[d];
            key[d + half] = second * cos[d + half] + first * sin[d + half];
        }
    }

    void recall() {
        const int64_t count = tokens_ + a_.delay - 1, begin = start_ + sequence_ * (a_.delay - 1);
        for (int64_t i = 0; i < count; i++) {
            const int64_t position = first_ + i + 1 - a_.delay, to = ((begin + i) * a_.heads + head_) * dim_;
            float rotated[MAX_DIM] = {}, plain[MAX_DIM] = {};
            if (position >= 0) {
                copy(key(position), rotated);
                rotate(rotated, i + 1);
                copy(value(position), plain);
            }
            copy(rotated, static_cast<T*>(a_.recent_key) + to);
            copy(plain, static_cast<T*>(a_.recent_value) + to);
            if (head_ == 0) a_.recent_exists[begin + i] = position >= 0;
        }
    }

    void remember(int64_t position) {
        const int64_t to = ring(position);
        copy(key(position), static_cast<T*>(a_.history_key) + to * dim_);
        copy(value(position), static_cast<T*>(a_.history_value) + to * dim_);
        a_.history_decisions[to] = decision(position);
        a_.history_omega[to] = omega(position);
    }

    const Append& a_;
    const int dim_;
    const int64_t sequence_, head_, start_, tokens_, row_, first_;
    int32_t* table_;
};

template <class T>
void enter(const Append& a) {
    const int64_t num_heads = a.sequences * a.heads;
    for (int64_t i = 0; i < num_heads; i++) Head<T>(a, i / a.heads, i % a.heads).grow();
    const int64_t work = a.heads * a.dim * (a.starts[a.sequences] + a.sequences * a.history);
    std::atomic<int64_t> taken{0};
    on_threads(work < MIN_PARALLEL_WORK ? 1 : a.threads, [&] {
        for (int64_t i; (i = taken++) < num_heads;) Head<T>(a, i / a.heads, i % a.heads).write();
    });
}

}  // namespace

// Products x W^T for few rows, of one x with several matrices: a BLAS reads the weights of such products at a fraction of
// the memory's speed.
constexpr int MOST_PRODUCTS = 4;  // stated in cpu.py too

struct Product {
    const void *weight, *bias;  // [outputs, inputs], [outputs] or null
    int64_t outputs;
    void* out;  // [rows, outputs]
};

struct Linear {
    int64_t rows, inputs, threads, count;
    const void* x;  // [rows, inputs]
    Product products[MOST_PRODUCTS];
};

struct GatedMlp {  // out = (act(x G^T + g) * (x U^T + u)) D^T + d
    int64_t rows, inputs, hidden, threads;
    const void *x, *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    int64_t outputs;
    void* out;
};

struct RmsNorm {  // out = x / sqrt(mean(x^2) + eps) * weight
    int64_t rows, dim;
    double eps;
    const void *x, *weight;
    void* out;
};

struct Rotate {  // x cos + half_turned(x) sin
    int64_t tokens, heads, dim;
    const void* x;  // [tokens, heads, dim]
    int64_t token_step, head_step;
    const void *cos, *sin;  // [tokens, dim]
    int64_t table_step;
    void* out;  // [tokens, heads, dim]
};

namespace {

constexpr int LINEAR_OUTPUTS = 32;  // rows of weights in a task
constexpr int LINEAR_ROWS = 8;      // rows that share a pass over a row of weights
constexpr int WEIGHTS_AHEAD = 4;    // rows of weights between the one in use and the one that is fetched

inline void widen(const float* from, Vec* to) {
    to[0] = load(from);
    to[1] = load(from + LANES);
}
inline void widen(const BFloat16* from, Vec* to) {  // in the order of unpack
    const Bits pairs = *reinterpret_cast<const Bits*>(from);
    to[0] = (Vec)(pairs << 16);
    to[1] = (Vec)(pairs & 0xffff0000u);
}

inline float load_one(const float* from) { return *from; }
inline float load_one(const BFloat16* from) {
    const uint32_t bits = uint32_t(from->bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(float));
    return value;
}
inline void store_one(float* to, float value) { *to = value; }
inline void store_one(BFloat16* to, float value) { to->bits = uint16_t(rounded(Vec{} + value)[0] >> 16); }

template <class T, int M>
inline void project(const float* x, int64_t inputs, const T* weight, float* sums) {
    Vec sum[M] = {};
    for (int64_t i = 0; i < inputs; i += 2 * LANES) {
        Vec w[2];
        for (size_t k = 0; k < 2 * LANES; k += LINE / sizeof(T))
            __builtin_prefetch(weight + WEIGHTS_AHEAD * inputs + i + k);
        widen(weight + i, w);
        for (int m = 0; m < M; m++) {
            const float* row = x + m * inputs + i;
            sum[m] += load(row) * w[0];
            sum[m] += load(row + LANES) * w[1];
        }
    }
    for (int m = 0; m < M; m++) sums[m] = sum_of(sum[m]);
}

template <class T, int M = LINEAR_ROWS>
inline void project_rows(int64_t rows, const float* x, int64_t inputs, const T* weight, float* sums) {
    if constexpr (M > 1) {
        if (rows < M) return project_rows<T, M - 1>(rows, x, inputs, weight, sums);
    }
    project<T, M>(x, inputs, weight, sums);
    if (rows > M) project_rows<T>(rows - M, x + M * inputs, inputs, weight, sums + M);
}

// Gives use(row, output, x[row] . weight[output]) for outputs begin..end - 1.
template <class T, class Use>
inline void project_span(int64_t rows, const float* x, int64_t inputs, const T* weight, int64_t begin, int64_t end,
                         float* sums, const Use& use) {
    for (int64_t i = begin; i < end; i++) {
        project_rows<T>(rows, x, inputs, weight + i * inputs, sums);
        for (int64_t row = 0; row < rows; row++) use(row, i, sums[row]);
    }
}

// Shares spans of all outputs of some products out among the threads: work(product, first output, end).
template <class Work>
inline void share_out(const int64_t* outputs, int64_t count, std::atomic<int64_t>& taken, const Work& work) {
    for (int64_t task; (task = taken++) >= 0;) {
        int64_t product = 0;
        for (; product < count; product++) {
            const int64_t spans = (outputs[product] + LINEAR_OUTPUTS - 1) / LINEAR_OUTPUTS;
            if (task < spans) break;
            task -= spans;
        }
        if (product == count) return;
        work(product, task * LINEAR_OUTPUTS, std::min((task + 1) * LINEAR_OUTPUTS, outputs[product]));
    }
}

template <class T>
inline std::vector<float> unpacked(const void* x, int64_t rows, int64_t inputs) {
    std::vector<float> to(rows * inputs);
    for (int64_t row = 0; row < rows; row++)
        unpack<T>(static_cast<const T*>(x) + row * inputs, int(inputs), to.data() + row * inputs);
    return to;
}

template <class T>
inline float bias_of(const void* bias, int64_t output) {
    return bias ? load_one(static_cast<const T*>(bias) + output) : 0.0f;
}

template <class T>
void linear(const Linear& a) {
    const std::vector<float> x = unpacked<T>(a.x, a.rows, a.inputs);
    int64_t outputs[MOST_PRODUCTS] = {}, total = 0;
    for (int64_t i = 0; i < a.count; i++) total += outputs[i] = a.products[i].outputs;
    std::atomic<int64_t> taken{0};
    on_threads(a.rows * a.inputs * total < MIN_PARALLEL_WORK ? 1 : a.threads, [&] {
        std::vector<float> sums(a.rows);
        share_out(outputs, a.count, taken, [&](int64_t i, int64_t begin, int64_t end) {
            const Product& p = a.products[i];
            project_span(a.rows, x.data(), a.inputs, static_cast<const T*>(p.weight), begin, end, sums.data(),
                         [&](int64_t row, int64_t output, float sum) {
                             store_one(static_cast<T*>(p.out) + row * p.outputs + output,
                                       sum + bias_of<T>(p.bias, output));
                         });
        });
    });
}

inline float silu(float x) {
    const float small = exp2_of(-std::fabs(x) * LOG2_E);  // e^-|x|
    return x * ((x >= 0 ? 1.0f : small) / (1.0f + small));
}

template <class T>
void gated_mlp(const GatedMlp& a) {
    const std::vector<float> x = unpacked<T>(a.x, a.rows, a.inputs);
    std::vector<T> between(a.rows * a.hidden);
    std::atomic<int64_t> taken{0}, taken_down{0};
    const int64_t work = a.rows * a.hidden * std::min(2 * a.inputs, a.outputs);
    const int64_t threads = work < MIN_PARALLEL_WORK ? 1 : a.threads;
    on_threads(threads, [&] {
        std::vector<float> sums(a.rows), gates(a.rows * LINEAR_OUTPUTS);
        share_out(&a.hidden, 1, taken, [&](int64_t, int64_t begin, int64_t end) {
            project_span(a.rows, x.data(), a.inputs, static_cast<const T*>(a.gate), begin, end, sums.data(),
                         [&](int64_t row, int64_t i, float sum) {
                             gates[row * LINEAR_OUTPUTS + i - begin] = silu(sum + bias_of<T>(a.gate_bias, i));
                         });
            project_span(a.rows, x.data(), a.inputs, static_cast<const T*>(a.up), begin, end, sums.data(),
                         [&](int64_t row, int64_t i, float sum) {
                             store_one(&between[row * a.hidden + i],
                                       gates[row * LINEAR_OUTPUTS + i - begin] * (sum + bias_of<T>(a.up_bias, i)));
                         });
        });
    });
    const std::vector<float> given = unpacked<T>(between.data(), a.rows, a.hidden);
    on_threads(threads, [&] {
        std::vector<float> sums(a.rows);
        share_out(&a.outputs, 1, taken_down, [&](int64_t, int64_t begin, int64_t end) {
            project_span(a.rows, given.data(), a.hidden, static_cast<const T*>(a.down), begin, end, sums.data(),
                         [&](int64_t row, int64_t i, float sum) {
                             store_one(static_cast<T*>(a.out) + row * a.outputs + i, sum + bias_of<T>(a.down_bias, i));
                         });
        });
    });
}

template <class T>
void rms_norm(const RmsNorm& a) {
    for (int64_t row = 0; row < a.rows; row++) {
        const T* x = static_cast<const T*>(a.x) + row * a.dim;
        T* out = static_cast<T*>(a.out) + row * a.dim;
        Vec squares = {};
        for (int64_t d = 0; d < a.dim; d += LANES) {
            const Vec values = load(x + d);
            squares += values * values;
        }
        const float factor = 1.0f / std::sqrt(sum_of(squares) / float(a.dim) + float(a.eps));
        for (int64_t d = 0; d < a.dim; d += LANES) {
            store(out + d, load(x + d) * factor);  // rounded before the weights, as transformers does
            store(out + d, load(out + d) * load(static_cast<const T*>(a.weight) + d));
        }
    }
}

// out = x cos + half_turned(x) sin
template <class T, class C>
inline void rotate_one(const T* x, const C* cos, const C* sin, int64_t dim, T* out) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d += LANES) {
        const Vec first = load(x + d), second = load(x + half + d);
        store(out + d, first * load(cos + d) - second * load(sin + d));
        store(out + half + d, second * load(cos + half + d) + first * load(sin + half + d));
    }
}

template <class T>
void rotate(const Rotate& a) {
    for (int64_t token = 0; token < a.tokens; token++) {
        const T* cos = static_cast<const T*>(a.cos) + token * a.table_step;
        const T* sin = static_cast<const T*>(a.sin) + token * a.table_step;
        for (int64_t head = 0; head < a.heads; head++) {
            const T* x = static_cast<const T*>(a.x) + token * a.token_step + head * a.head_step;
            rotate_one(x, cos, sin, a.dim, static_cast<T*>(a.out) + (token * a.heads + head) * a.dim);
        }
    }
}

}  // namespace

// One token of each sequence through a whole decoder layer: norm, projections, gates, RoPE, cache, attention, W_o, norm, MLP,
// with the residuals. What `append` is given of new tokens, and what it gives back, lies in buffers of its own.
struct DecodeLayer {
    int64_t hidden, group;
    const void *x, *norm, *mlp_norm;  // [S, hidden], [hidden], [hidden]
    double norm_eps, mlp_norm_eps;
    const void *query, *query_bias, *key, *key_bias, *value, *value_bias, *output, *output_bias;
    const void *adapter, *adapter_bias;  // rows of decision and importance of each head side by side, or null
    double decision_scale, decision_offset, omega_offset, omega_eps;
    int64_t weighs;  // whether omega is learned; else it is 1
    GatedMlp mlp;    // without x and out
    double scaling;
    void* out;  // [S, hidden]
    Append append;
};

namespace {

template <class T>
void add_to(T* sums, const void* other, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        store(sums + i, load(sums + i) + load(static_cast<const T*>(other) + i));
}

// One output of a gate adapter, summed and returned in float32 whatever T: its scale would magnify what 16 bits round off.
template <class T>
float adapter_output(const DecodeLayer& a, const T* states, int64_t output) {
    const T* weight = static_cast<const T*>(a.adapter) + output * a.hidden;
    Vec products = {};
    for (int64_t i = 0; i < a.hidden; i += LANES) products += load(states + i) * load(weight + i);
    return sum_of(products) + (a.adapter_bias ? load_one(static_cast<const T*>(a.adapter_bias) + output) : 0.0f);
}

template <class T>
void decode_layer(const DecodeLayer& a) {
    Append append = a.append;
    const int64_t rows = append.sequences, heads = append.heads, dim = append.dim, of_keys = heads * dim;
    const int64_t of_queries = a.group * of_keys, threads = append.threads;
    std::vector<T> normed(rows * a.hidden), query(rows * of_queries), key(rows * of_keys), value(rows * of_keys);
    std::vector<T> attended(rows * of_queries), between(rows * a.hidden);
    rms_norm<T>({rows, a.hidden, a.norm_eps, a.x, a.norm, normed.data()});
    Linear projections = {rows, a.hidden, threads, 3, normed.data(), {}};
    projections.products[0] = {a.query, a.query_bias, of_queries, query.data()};
    projections.products[1] = {a.key, a.key_bias, of_keys, key.data()};
    projections.products[2] = {a.value, a.value_bias, of_keys, value.data()};
    linear<T>(projections);
    const std::unique_ptr<bool[]> decisions(new bool[rows * heads]);
    std::vector<float> omega(rows * heads, 1.0f);
    if (a.adapter)
        for (int64_t i = 0; i < rows * heads; i++) {
            const T* states = normed.data() + i / heads * a.hidden;
            const int64_t output = 2 * (i % heads);
            decisions[i] = float(a.decision_scale) * adapter_output(a, states, output) - float(a.decision_offset) > 0;
            if (a.weighs) {
                const float importance = adapter_output(a, states, output + 1) + float(a.omega_offset);
                omega[i] = 1 / (1 + std::exp(-importance)) + float(a.omega_eps);
            }
        }
    const auto turn = [&](std::vector<T>& states, int64_t count) {
        const std::vector<T> plain = states;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < count; head++) {
                const int64_t at = (row * count + head) * dim, place = (row + 1) * (append.delay + 1) - 1;
                rotate_one(&plain[at], append.cos + place * dim, append.sin + place * dim, dim, &states[at]);
            }
    };
    turn(query, a.group * heads);
    if (!append.gated) turn(key, heads);
    std::vector<int32_t> seen(rows * heads);
    const int64_t num_recent = append.delay > 0 ? rows * append.delay : 0;
    std::vector<T> recent_key(num_recent * of_keys), recent_value(num_recent * of_keys);
    const std::unique_ptr<bool[]> recent_exists(new bool[num_recent]);
    append.key = key.data(), append.value = value.data();
    append.key_step = append.value_step = of_keys, append.key_head_step = append.value_head_step = dim;
    append.decisions = decisions.get(), append.omega = omega.data();
    append.decisions_step = append.omega_step = heads, append.decisions_head_step = append.omega_head_step = 1;
    append.seen = seen.data();
    if (num_recent > 0) {
        append.recent_key = recent_key.data(), append.recent_value = recent_value.data();
        append.recent_exists = recent_exists.get();
    }
    enter<T>(append);
    Attention attention = {};
    attention.sequences = rows, attention.kv_heads = heads, attention.group = a.group, attention.dim = dim;
    attention.block = append.block, attention.threads = threads, attention.scaling = a.scaling;
    attention.query = query.data(), attention.query_step = of_queries, attention.query_head_step = dim;
    attention.key_pages = append.key_pages, attention.value_pages = append.value_pages;
    attention.key_scales = append.key_scales, attention.value_scales = append.value_scales;
    attention.rows = append.rows, attention.tables = append.tables;
    attention.table_row_step = append.table_row_step, attention.table_head_step = append.table_head_step;
    attention.slots = append.lengths, attention.slots_by_row = 1;
    attention.recent_key = append.recent_key, attention.recent_value = append.recent_value;
    attention.recent_exists = append.recent_exists, attention.delay = append.delay;
    attention.out = attended.data(), attention.num_rows = append.num_rows, attention.num_slots = append.num_slots;
    if (append.key_scales)
        attend<T, int8_t>(attention);
    else
        attend<T, T>(attention);
    Linear output = {rows, of_queries, threads, 1, attended.data(), {}};
    output.products[0] = {a.output, a.output_bias, a.hidden, between.data()};
    linear<T>(output);
    add_to(between.data(), a.x, rows * a.hidden);
    rms_norm<T>({rows, a.hidden, a.mlp_norm_eps, between.data(), a.mlp_norm, normed.data()});
    GatedMlp mlp = a.mlp;
    mlp.x = normed.data(), mlp.out = a.out;
    gated_mlp<T>(mlp);
    add_to(static_cast<T*>(a.out), between.data(), rows * a.hidden);
}

}  // namespace

// What eviction works on: heads of some rows, and what is kept for their slots.
struct Heads {
    int64_t sequences, heads, block, threads;
    const int64_t* rows;  // [S]
    char* const* pages;   // [F], each [N, block, D]
    const int64_t* widths;  // [F], bytes of a slot
    int64_t num_pages;      // F
    int32_t *free_blocks, *num_free;
    const int32_t* tables;  // [C, H, M]
    int64_t table_row_step, table_head_step;
    int32_t* lengths;  // [C, H]
    int64_t num_rows, num_slots;  // C, and the slots that a table can name
};

struct Compact {
    Heads heads;
    const bool* keep;  // [S, H, keep_step]
    int64_t keep_step;
};

struct Evict {
    Heads heads;
    const int64_t* slots;  // [S, H]
};

struct ReadMetadata {  // the first `count` slots of each head
    Heads heads;
    int64_t count;
    int32_t* const* metadata;  // [F], the bits of each, [S, H, count]
    const int64_t* fills;   // [F], what is read beyond the length
};

struct WriteMetadata {  // the slots of the newest tokens
    Heads heads;
    const int64_t* starts;  // [S + 1]
    int32_t* const* metadata;  // [F], the bits of each, [T, H]

    int64_t count(int64_t head) const { return starts[head / heads.heads + 1] - starts[head / heads.heads]; }
};

struct AddAttention {
    Heads heads;  // its pages are the sums
    int64_t group, entries;
    const float* scores;  // [S, H_q, entries or more]
    int64_t score_sequence_step, score_head_step;
    const int64_t* powers;  // [F]
    float* attention;       // [S, H, entries]
};

struct NthNewest {
    int64_t heads, entries, threads;
    const int32_t* positions;  // [S, H, entries]
    const int64_t* counts;     // [S, H]
    int32_t* found;            // [S, H]
};

struct Candidate {
    int64_t sequences, heads, entries, threads;
    const float* scores;  // [S, H, entries]
    int64_t score_sequence_step, score_head_step;
    const int32_t* positions;         // [S, H, entries]
    const int64_t *lengths, *limits;  // [S, H], [S]
    int64_t* slots;                   // [S, H]
};

namespace {

class HeadEntries {  // one head of one sequence, and its blocks
  public:
    HeadEntries(const Heads& a, int64_t index)
        : a_(a), row_(a.rows[index / a.heads]), head_(index % a.heads),
          table_(a.tables + row_ * a.table_row_step + head_ * a.table_head_step) {}

    int32_t& length() const { return a_.lengths[row_ * a_.heads + head_]; }

    int64_t place(int64_t slot) const { return table_[slot / a_.block] * a_.block + slot % a_.block; }

    template <class T>
    T* at(int64_t field, int64_t slot) const {
        return reinterpret_cast<T*>(a_.pages[field] + place(slot) * a_.widths[field]);
    }

    void move(int64_t from, int64_t to) const {
        for (int64_t field = 0; field < a_.num_pages; field++)
            std::memcpy(at<char>(field, to), at<char>(field, from), a_.widths[field]);
    }

    // Calls work(first, how many) for stretches of slots begin..end - 1 that lie together.
    template <class Work>
    void for_each_run(int64_t begin, int64_t end, const Work& work) const {
        for (int64_t count; begin < end; begin += count) {
            count = std::min(end - begin, a_.block - begin % a_.block);
            work(begin, count);
        }
    }

    // Heads come in order, for they share the free list.
    void shrink(int32_t new_length) const {
        const int64_t end = (length() + a_.block - 1) / a_.block;
        for (int64_t i = (new_length + a_.block - 1) / a_.block; i < end; i++)
            a_.free_blocks[(*a_.num_free)++] = table_[i];
        length() = new_length;
    }

  private:
    const Heads& a_;
    const int64_t row_, head_;
    const int32_t* table_;
};

// Runs work(0) to work(count - 1); `cost` is what they move or multiply together.
template <class Work>
void for_each(int64_t count, int64_t cost, int64_t threads, const Work& work) {
    std::atomic<int64_t> taken{0};
    on_threads(cost < MIN_PARALLEL_WORK ? 1 : threads, [&] {
        for (int64_t i; (i = taken++) < count;) work(i);
    });
}

template <class Work>
void for_each_head(const Heads& a, int64_t cost, const Work& work) {
    for_each(a.sequences * a.heads, cost, a.threads, work);
}

void compact(const Compact& c) {
    const Heads& a = c.heads;
    int64_t width = 0;
    for (int64_t field = 0; field < a.num_pages; field++) width += a.widths[field];
    std::vector<int32_t> kept(a.sequences * a.heads);
    for_each_head(a, c.keep_step * a.sequences * a.heads * width / 8, [&](int64_t i) {
        const HeadEntries entries(a, i);
        const bool* keep = c.keep + i * c.keep_step;
        int32_t count = 0;
        for (int64_t slot = 0; slot < entries.length(); slot++) {
            if (!keep[slot]) continue;
            if (slot != count) entries.move(slot, count);
            count++;
        }
        kept[i] = count;
    });
    for (size_t i = 0; i < kept.size(); i++) HeadEntries(a, i).shrink(kept[i]);
}

void evict(const Evict& e) {
    for (int64_t i = 0; i < e.heads.sequences * e.heads.heads; i++) {
        const HeadEntries entries(e.heads, i);
        const int64_t hole = e.slots[i], last = entries.length() - 1;
        if (hole < 0) continue;
        if (hole != last) entries.move(last, hole);
        entries.shrink(last);
    }
}

void write_metadata(const WriteMetadata& n) {
    const Heads& a = n.heads;
    for_each_head(a, n.starts[a.sequences] * a.heads * a.num_pages, [&](int64_t i) {
        const HeadEntries entries(a, i);
        const int64_t begin = entries.length() - n.count(i);
        for (int64_t field = 0; field < a.num_pages; field++) {
            const int32_t* from = n.metadata[field] + n.starts[i / a.heads] * a.heads + i % a.heads;
            for (int64_t slot = begin; slot < entries.length(); slot++, from += a.heads)
                *entries.at<int32_t>(field, slot) = *from;
        }
    });
}

void read_metadata(const ReadMetadata& n) {
    const Heads& a = n.heads;
    for_each_head(a, a.sequences * a.heads * n.count * a.num_pages, [&](int64_t i) {
        const HeadEntries entries(a, i);
        const int64_t end = std::min<int64_t>(entries.length(), n.count);
        for (int64_t field = 0; field < a.num_pages; field++) {
            int32_t* to = n.metadata[field] + i * n.count;
            entries.for_each_run(0, end, [&](int64_t slot, int64_t count) {
                std::copy_n(entries.at<int32_t>(field, slot), count, to + slot);
            });
            std::fill(to + end, to + n.count, int32_t(n.fills[field]));
        }
    });
}

void add_attention(const AddAttention& n) {
    const Heads& a = n.heads;
    for_each_head(a, a.sequences * a.heads * n.entries * (n.group + a.num_pages), [&](int64_t i) {
        const HeadEntries entries(a, i);
        const int64_t length = entries.length();
        const float* scores = n.scores + i / a.heads * n.score_sequence_step + i % a.heads * n.group * n.score_head_step;
        float* attention = n.attention + i * n.entries;
        std::copy_n(scores, length, attention);
        for (int64_t member = 1; member < n.group; member++)
            for (int64_t slot = 0; slot < length; slot++) attention[slot] += scores[member * n.score_head_step + slot];
        for (int64_t slot = 0; slot < length; slot++) attention[slot] /= float(n.group);
        std::fill(attention + length, attention + n.entries, 0.0f);
        for (int64_t field = 0; field < a.num_pages; field++)
            entries.for_each_run(0, length, [&](int64_t slot, int64_t count) {
                float* sums = entries.at<float>(field, slot);
                if (n.powers[field] == 1)
                    for (int64_t j = 0; j < count; j++) sums[j] += attention[slot + j];
                else
                    for (int64_t j = 0; j < count; j++) sums[j] += attention[slot + j] * attention[slot + j];
            });
    });
}

// By bisection over positions: a pass over a head's entries counts those from the middle on.
void nth_newest(const NthNewest& n) {
    constexpr int64_t PASSES = 16;
    for_each(n.heads, n.heads * n.entries * PASSES, n.threads, [&](int64_t i) {
        const int32_t* positions = n.positions + i * n.entries;
        int32_t low = 0, high = INT32_MAX;  // as many as are asked for lie from `low` on, or all; fewer from `high` on
        if (n.counts[i] <= 0) low = high;
        if (low < high && n.entries > 0) high = *std::max_element(positions, positions + n.entries) + 1;
        while (high - low > 1) {
            const int32_t middle = low + (high - low) / 2;
            int32_t count = 0;
            for (int64_t j = 0; j < n.entries; j++) count += positions[j] >= middle;
            (count >= n.counts[i] ? low : high) = middle;
        }
        n.found[i] = low;
    });
}

void candidates(const Candidate& c) {
    const int64_t num_heads = c.sequences * c.heads;
    for_each(num_heads, num_heads * c.entries, c.threads, [&](int64_t i) {
        const float* scores = c.scores + i / c.heads * c.score_sequence_step + i % c.heads * c.score_head_step;
        const int32_t* positions = c.positions + i * c.entries;
        const int64_t length = c.lengths[i];
        c.slots[i] = -1;
        if (length <= c.limits[i / c.heads]) return;
        float least = scores[0];
        for (int64_t j = 1; j < length; j++) least = scores[j] < least ? scores[j] : least;
        int32_t youngest = -1;
        c.slots[i] = 0;
        for (int64_t j = 0; j < length; j++)
            if (scores[j] == least && positions[j] > youngest) youngest = positions[j], c.slots[i] = j;
    });
}

}  // namespace

// What slots receive from all queries of a prompt.
struct Received {
    Heads heads;  // its pages are the keys, and the factors of 8-bit ones
    int64_t dim, group, most, entries;  // most: queries of a sequence
    double scaling;
    const int64_t* starts;  // where the queries of each sequence begin, and the end, [S + 1]
    const void* query;      // [T, H_q, D]
    int64_t query_step, query_head_step;
    const int32_t* slots;      // seen by each query, [T, H]
    const float* lse;          // log of the sum of exp of its scores, [T, H_q]
    float *columns, *squares;  // [S, H, group, entries], [S, H, entries], zeros

    int64_t start(int64_t head) const { return starts[head / heads.heads]; }
    int64_t queries(int64_t head) const { return starts[head / heads.heads + 1] - start(head); }
    int32_t seen(int64_t head, int64_t i) const { return slots[(start(head) + i) * heads.heads + head % heads.heads]; }
};

namespace {

constexpr int WIDTH = ROWS * LANES;  // queries that share a pass over the keys, one to a lane
constexpr int KEY_TILE = 32;         // keys whose sums a task holds

// One pass over Q K^T, in which each task owns some keys, so that sums need no locks and do not depend on the number of
// threads.
template <class T, class P>
class Receiver {
  public:
    explicit Receiver(const Received& v)
        : v_(v), a_(v.heads), dim_(int(v.dim)), num_heads_(a_.sequences * a_.heads),
          blocks_((v.most + WIDTH - 1) / WIDTH), packed_(new float[num_heads_ * v.group * blocks_ * dim_ * WIDTH]),
          normalization_(num_heads_ * v.group * blocks_ * WIDTH), limits_(num_heads_ * blocks_ * WIDTH),
          last_(num_heads_ * blocks_) {}

    void run() {
        for (int64_t head = 0; head < num_heads_; head++)
            for (int64_t query = 0; query < v_.queries(head); query++) {
                const int32_t limit = limits_[head * blocks_ * WIDTH + query] = v_.seen(head, query);
                int32_t& last = last_[head * blocks_ + query / WIDTH];
                last = std::max(last, limit);
            }
        const int64_t cost = v_.starts[a_.sequences] * v_.entries * dim_ * a_.heads * v_.group;
        for_each(blocks_ * num_heads_ * v_.group, cost / v_.entries, a_.threads, [&](int64_t i) {
            pack_queries(i % (num_heads_ * v_.group), i / (num_heads_ * v_.group));
        });
        const int64_t tiles = (v_.entries + KEY_TILE - 1) / KEY_TILE;
        for_each(tiles * num_heads_, cost, a_.threads,
                 [&](int64_t i) { receive(i % num_heads_, i / num_heads_ * KEY_TILE); });
    }

  private:
    float* packed(int64_t query_head, int64_t block) const {
        return &packed_[(query_head * blocks_ + block) * dim_ * WIDTH];
    }
    const int32_t* limits(int64_t head, int64_t block) const { return &limits_[(head * blocks_ + block) * WIDTH]; }

    // Lays the channels of the queries side by side, scaled for the softmax to the base 2, and their normalization.
    void pack_queries(int64_t query_head, int64_t block) {
        const int64_t head = query_head / v_.group, first = block * WIDTH, of_token = a_.heads * v_.group;
        const T* query = static_cast<const T*>(v_.query) + v_.start(head) * v_.query_step +
                         query_head % of_token * v_.query_head_step;
        const float* lse = v_.lse + v_.start(head) * of_token + query_head % of_token;
        float* normalization = &normalization_[(query_head * blocks_ + block) * WIDTH];
        float* to = packed(query_head, block);
        float channels[MAX_DIM];
        std::fill_n(to, dim_ * WIDTH, 0.0f);
        for (int64_t lane = 0; lane < std::min<int64_t>(WIDTH, v_.queries(head) - first); lane++) {
            unpack<P>(query + (first + lane) * v_.query_step, dim_, channels);
            for (int d = 0; d < dim_; d++) to[d * WIDTH + lane] = channels[d] * (float(v_.scaling) * LOG2_E);
            normalization[lane] = lse[(first + lane) * of_token] * LOG2_E;
        }
    }

    // Scores of a block's queries with some keys; MASKED where a query does not see the key.
    void score(const float* queries, const int32_t* limits, int32_t first, const float* const* keys,
               Vec (&scores)[KEYS][ROWS]) const {
        for (auto& of_key : scores) std::fill_n(of_key, ROWS, Vec{});
        for (int d = 0; d < dim_; d++, queries += WIDTH) {
            Vec query[ROWS];
            for (int r = 0; r < ROWS; r++) query[r] = load(queries + r * LANES);
            for (int j = 0; j < KEYS; j++)
                for (int r = 0; r < ROWS; r++) scores[j][r] += query[r] * keys[j][d];
        }
        for (int r = 0; r < ROWS; r++) {
            const Ints limit = *reinterpret_cast<const Ints*>(limits + r * LANES);
            for (int j = 0; j < KEYS; j++) scores[j][r] = limit > first + j ? scores[j][r] : Vec{} + MASKED;
        }
    }

    // Points to a key in float32, in scratch if need be.
    const float* key(const HeadEntries& entries, int64_t slot, float* scratch) const {
        slot = std::min<int64_t>(slot, entries.length() - 1);
        const P* held = entries.at<const P>(0, slot);
        const float* wide;
        widen<P>(&held, 1, 0, dim_, scratch, &wide);
        if constexpr (is_8_bit<P>) scale(scratch, dim_, *entries.at<float>(1, slot));
        return wide;
    }

    void receive(int64_t head, int64_t first) {
        const HeadEntries entries(a_, head);
        const float share = 1.0f / float(v_.group);
        float wide[KEY_TILE][MAX_DIM];
        const float* keys[KEY_TILE];
        if (first >= entries.length()) return;
        for (int j = 0; j < KEY_TILE; j++) keys[j] = key(entries, first + j, wide[j]);
        std::vector<float> columns(v_.group * KEY_TILE * LANES), squares(KEY_TILE * LANES);
        for (int64_t block = 0; block * WIDTH < v_.queries(head); block++) {
            const int32_t last = last_[head * blocks_ + block];
            for (int tile = 0; tile < KEY_TILE && first + tile < last; tile += KEYS) {
                Vec mean[KEYS][ROWS] = {};
                for (int64_t member = 0; member < v_.group; member++) {
                    const int64_t query_head = head * v_.group + member;
                    const float* normalization = &normalization_[(query_head * blocks_ + block) * WIDTH];
                    Vec scores[KEYS][ROWS];
                    score(packed(query_head, block), limits(head, block), int32_t(first) + tile, keys + tile, scores);
                    for (int j = 0; j < KEYS; j++) {
                        float* column = &columns[(member * KEY_TILE + tile + j) * LANES];
                        Vec sum = load(column);
                        for (int r = 0; r < ROWS; r++) {
                            const Vec weight = exp2_of(scores[j][r] - load(normalization + r * LANES));
                            mean[j][r] += share * weight;
                            sum += weight;
                        }
                        store(column, sum);
                    }
                }
                for (int j = 0; j < KEYS; j++) {
                    Vec sum = load(&squares[(tile + j) * LANES]);
                    for (int r = 0; r < ROWS; r++) sum += mean[j][r] * mean[j][r];
                    store(&squares[(tile + j) * LANES], sum);
                }
            }
        }
        for (int64_t j = 0; j < std::min<int64_t>(KEY_TILE, v_.entries - first); j++) {
            v_.squares[head * v_.entries + first + j] = sum_of(load(&squares[j * LANES]));
            for (int64_t member = 0; member < v_.group; member++)
                v_.columns[(head * v_.group + member) * v_.entries + first + j] =
                    sum_of(load(&columns[(member * KEY_TILE + j) * LANES]));
        }
    }

    const Received& v_;
    const Heads& a_;
    const int dim_;
    const int64_t num_heads_, blocks_;
    std::unique_ptr<float[]> packed_;      // queries, [S, H_q, blocks, D, WIDTH]
    std::vector<float> normalization_;     // log2 of the sum of a query's 2^scores, [S, H_q, blocks, WIDTH]
    std::vector<int32_t> limits_, last_;   // slots seen, 0 where there is no query, [S, H, blocks, WIDTH]; most of a block
};

}  // namespace

namespace {

// What is wrong with arguments, or null: asked before anything is read by them or written.
constexpr const char NO_ROW[] = "a cache row that does not exist", NO_ENTRY[] = "an entry that is not held",
                     TOO_LONG[] = "more slots than its block table, or what is given beside it, has room for",
                     NO_BLOCK[] = "more blocks wanted than are free";

inline const char* wrong_rows(const int64_t* rows, int64_t count, int64_t num_rows) {
    if (rows == nullptr) return count <= num_rows ? nullptr : NO_ROW;
    return std::all_of(rows, rows + count, [&](int64_t row) { return 0 <= row && row < num_rows; }) ? nullptr : NO_ROW;
}

inline const char* wrong(const Attention& a) {
    if (const char* found = wrong_rows(a.rows, a.sequences, a.num_rows)) return found;
    const int64_t most = a.scores ? std::min(a.num_slots, a.scores_step) : a.num_slots;
    for (int64_t sequence = 0; sequence < a.sequences; sequence++)
        for (int64_t head = 0; head < a.kv_heads; head++)
            for (int64_t query = 0; query < a.queries(sequence); query++) {
                const int64_t seen = a.seen(sequence, head, query);
                if (seen < 0 || seen > most) return TOO_LONG;
            }
    return nullptr;
}

template <class T>
const char* wrong(const Append& a) {
    if (const char* found = wrong_rows(a.rows, a.sequences, a.num_rows)) return found;
    int64_t blocks = 0;
    for (int64_t i = 0; i < a.sequences * a.heads; i++) {
        const Head<T> head(a, i / a.heads, i % a.heads);
        const int64_t grown = head.grown();
        if (head.length() < 0 || grown > a.num_slots) return TOO_LONG;
        blocks += (grown + a.block - 1) / a.block - (head.length() + a.block - 1) / a.block;
    }
    return blocks <= *a.num_free ? nullptr : NO_BLOCK;
}

// `fits` is asked for the index and the length of every head.
template <class Fits>
const char* wrong_heads(const Heads& a, const char* complaint, const Fits& fits) {
    if (const char* found = wrong_rows(a.rows, a.sequences, a.num_rows)) return found;
    for (int64_t i = 0; i < a.sequences * a.heads; i++) {
        const int64_t length = a.lengths[a.rows[i / a.heads] * a.heads + i % a.heads];
        if (length < 0 || length > a.num_slots) return TOO_LONG;
        if (!fits(i, length)) return complaint;
    }
    return nullptr;
}

inline const char* wrong(const Compact& c) {
    return wrong_heads(c.heads, TOO_LONG, [&](int64_t, int64_t length) { return length <= c.keep_step; });
}

inline const char* wrong(const Evict& e) {
    return wrong_heads(e.heads, NO_ENTRY, [&](int64_t i, int64_t length) { return e.slots[i] < length; });
}

inline const char* wrong(const WriteMetadata& n) {
    return wrong_heads(n.heads, NO_ENTRY, [&](int64_t i, int64_t length) { return n.count(i) <= length; });
}

inline const char* wrong(const ReadMetadata& n) {
    return wrong_heads(n.heads, NO_ENTRY, [](int64_t, int64_t) { return true; });
}

inline const char* wrong(const AddAttention& n) {
    return wrong_heads(n.heads, TOO_LONG, [&](int64_t, int64_t length) { return length <= n.entries; });
}

inline const char* wrong(const Candidate& c) {
    const auto fits = [&](int64_t length) { return 0 < length && length <= c.entries; };
    return std::all_of(c.lengths, c.lengths + c.sequences * c.heads, fits) ? nullptr : TOO_LONG;
}

inline const char* wrong(const Received& v) {
    return wrong_heads(v.heads, TOO_LONG, [&](int64_t i, int64_t length) {
        for (int64_t query = 0; query < v.queries(i); query++)
            if (v.seen(i, query) <= 0 || v.seen(i, query) > length) return false;
        return true;
    });
}

// Its new tokens are not there yet: each is taken to be appended.
inline const char* wrong(const DecodeLayer& a) {
    const Append& to = a.append;
    if (const char* found = wrong_rows(to.rows, to.sequences, to.num_rows)) return found;
    int64_t blocks = 0;
    for (int64_t i = 0; i < to.sequences * to.heads; i++) {
        const int64_t length = to.lengths[to.rows[i / to.heads] * to.heads + i % to.heads];
        if (length < 0 || length + 1 > to.num_slots) return TOO_LONG;
        blocks += length % to.block == 0;
    }
    return blocks <= *to.num_free ? nullptr : NO_BLOCK;
}

template <class Work>
const char* unless(const char* found, const Work& work) {
    if (found == nullptr) work();
    return found;
}

}  // namespace

// Each returns what is wrong with its arguments, and has done nothing then, or null.
#define CHECKED(name, Arguments, problem, work) \
    const char* name(const Arguments* arguments) { \
        const Arguments& a = *arguments; \
        return unless(problem, [&] { work; }); \
    }

extern "C" {
void use_fork_join(ForkJoin function) { fork_join = function; }
CHECKED(attend_float32, Attention, wrong(a), (attend<float, float>(a)))
CHECKED(attend_bfloat16, Attention, wrong(a), (attend<BFloat16, BFloat16>(a)))
CHECKED(attend_float32_int8, Attention, wrong(a), (attend<float, int8_t>(a)))
CHECKED(attend_bfloat16_int8, Attention, wrong(a), (attend<BFloat16, int8_t>(a)))
CHECKED(linear_float32, Linear, nullptr, linear<float>(a))
CHECKED(linear_bfloat16, Linear, nullptr, linear<BFloat16>(a))
CHECKED(decode_layer_float32, DecodeLayer, wrong(a), decode_layer<float>(a))
CHECKED(decode_layer_bfloat16, DecodeLayer, wrong(a), decode_layer<BFloat16>(a))
CHECKED(gated_mlp_float32, GatedMlp, nullptr, gated_mlp<float>(a))
CHECKED(gated_mlp_bfloat16, GatedMlp, nullptr, gated_mlp<BFloat16>(a))
CHECKED(rms_norm_float32, RmsNorm, nullptr, rms_norm<float>(a))
CHECKED(rms_norm_bfloat16, RmsNorm, nullptr, rms_norm<BFloat16>(a))
CHECKED(rotate_float32, Rotate, nullptr, rotate<float>(a))
CHECKED(rotate_bfloat16, Rotate, nullptr, rotate<BFloat16>(a))
CHECKED(append_float32, Append, wrong<float>(a), enter<float>(a))
CHECKED(append_bfloat16, Append, wrong<BFloat16>(a), enter<BFloat16>(a))
CHECKED(compact, Compact, wrong(a), compact(a))
CHECKED(evict, Evict, wrong(a), evict(a))
CHECKED(write_metadata, WriteMetadata, wrong(a), write_metadata(a))
CHECKED(read_metadata, ReadMetadata, wrong(a), read_metadata(a))
CHECKED(add_attention, AddAttention, wrong(a), add_attention(a))
CHECKED(nth_newest, NthNewest, nullptr, nth_newest(a))
CHECKED(eviction_candidate, Candidate, wrong(a), candidates(a))
CHECKED(receive_float32, Received, wrong(a), (Receiver<float, float>(a).run()))
CHECKED(receive_bfloat16, Received, wrong(a), (Receiver<BFloat16, BFloat16>(a).run()))
CHECKED(receive_float32_int8, Received, wrong(a), (Receiver<float, int8_t>(a).run()))
CHECKED(receive_bfloat16_int8, Received, wrong(a), (Receiver<BFloat16, int8_t>(a).run()))
}
