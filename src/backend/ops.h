// backend/ops.h - the operations: everything that touches elements of tensors.
//
// The CPU and CUDA backends define the same functions; the linker chooses. All run on the compute
// stream unless they take a stream. Bits never depend on the number of threads.
//
// Shapes: B batch, T sequence, N = B * T rows, C channels, NH heads, HS = C / NH, V vocabulary,
// Vp = V padded. Inputs and outputs must not overlap unless stated.
#ifndef BACKEND_OPS_H
#define BACKEND_OPS_H

#include "core/dtype.h"
#include "core/check.h"
#include "backend/device.h"

#ifdef __cplusplus
extern "C" {
#endif

// A matrix of activations: row r begins at ptr + r * ld.
typedef struct {
    floatX* ptr;
    size_t ld; // >= columns
} Rows;

// A weight gradient to be written: `=` floatX, `=` fp32, or `+=` fp32. ZeRO decides which; model
// code passes it on unread.
typedef struct {
    void* ptr; // floatX*, or float* if is_fp32
    bool is_fp32;
    bool accumulate; // += (fp32 only)
} Grad;

// The gradient of the tensor that begins `offset` elements into the unit whose gradient is g.
static inline Grad grad_at(Grad g, size_t offset) {
    g.ptr = (char*)g.ptr + offset * (g.is_fp32 ? sizeof(float) : sizeof(floatX));
    return g;
}

// ---- set-up -------------------------------------------------------------------------------------

// Row stride in elements for activations of `cols` columns and N rows: padded by a cache line where
// that is faster (CPU: power-of-two strides hit few cache sets), else cols.
size_t ops_row_stride(size_t N, size_t cols);

// The largest shapes that the operations will see; from it the backend sizes its scratch.
typedef struct {
    int B, T, C, NH, Vp;
    int threads;     // CPU
    int logits_rows; // rows of the classifier chunk
    bool backward;   // training; false: forward only
    bool tf32;       // CUDA, fp32 build: products in TF32 (10 bits of mantissa) on tensor cores
    // CUDA: GELU inside the matrix product; 0 never, 1 forward, 2 and backward, -1 the device's way
    int gelu_fusion;
} OpsShape;

// Bytes of scratch that ops_init wants: a line of the plan ("scratch"). Depends on its argument
// only.
size_t ops_scratch_bytes(const OpsShape* shape);
void ops_init(const OpsShape* shape, void* scratch); // once, after device_init; creates handles
void ops_free(void);
const char* ops_description(void); // what carries the matrix products: "oneDNN 2.6.3 bf16", ...

// ---- embedding ----------------------------------------------------------------------------------

// out[b,t,:] = wte[tokens[b,t],:] + wpe[first_pos + t,:]
//   out (B*T, C)   tokens (B, T) device   wte (Vp, C)   wpe (maxT, C)
void embedding_forward(Rows out, const int* tokens, const floatX* wte, const floatX* wpe,
                       int first_pos, int B, int T, int C);

// dwte[v,:] += sum over the positions that hold v, in index order; dwte is fp32 and already holds
// the head's part. dwpe[t,:] (+)= sum over b; with `=` rows T..maxT-1 become 0.
//   dwte (Vp, C)   dwpe (maxT, C)   dout (B*T, C)   tokens (B, T) device
void embedding_backward(Grad dwte, Grad dwpe, Rows dout, const int* tokens, int B, int T, int C,
                        int maxT, int V);

// ---- LayerNorm ----------------------------------------------------------------------------------

// residual = a + b (b.ptr NULL: residual is a, nothing is written, residual is not used)
// out = (residual - mean) * rstd * weight + bias over each row. Sums in fp32, eps = 1e-5.
//   residual, out, a, b (N, C)   mean, rstd (N) fp32   weight, bias (C)
// The statistics are those of the residual as rounded to floatX. residual may be a.
// Source: Ba et al. 2016, arXiv:1607.06450, eq. 4.
void layernorm_forward(Rows out, float* mean, float* rstd, Rows residual, Rows a, Rows b,
                       const floatX* weight, const floatX* bias, int N, int C);

// dinp = dresidual + the gradient through the normalisation (dresidual.ptr NULL: 0). dinp may be
// dresidual. dweight, dbias (C) as their Grad says, summed over rows in an order fixed by N alone.
//   dinp, dresidual, dout, inp (N, C)
void layernorm_backward(Rows dinp, Rows dresidual, Grad dweight, Grad dbias, Rows dout, Rows inp,
                        const float* mean, const float* rstd, const floatX* weight, int N, int C);

// ---- matrix products ----------------------------------------------------------------------------

// Layout of a weight that maps C inputs to OC outputs: GPT-2's Conv1D stores (C, OC); the
// embedding, used as the head, is (OC, C).
typedef enum { WEIGHT_IN_OUT, WEIGHT_OUT_IN } WeightLayout;

// out = in * W + bias (bias NULL: none). With pre_gelu.ptr: pre_gelu = in * W + bias and
// out = gelu(pre_gelu), from the rounded pre_gelu. Accumulation in fp32.
//   out, pre_gelu (N, OC)   in (N, C)   bias (OC)
void matmul_forward(Rows out, Rows pre_gelu, Rows in, const floatX* weight, WeightLayout layout,
                    const floatX* bias, int N, int C, int OC);

// din = dout * W^T; with pre_gelu.ptr: din = (dout * W^T) * gelu'(pre_gelu).
//   din, pre_gelu (N, C)   dout (N, OC)
void matmul_backward_input(Rows din, Rows dout, const floatX* weight, WeightLayout layout,
                           Rows pre_gelu, int N, int C, int OC);

// dweight (+)= in^T * dout in the weight's layout, dbias (+)= column sums of dout (dbias.ptr NULL:
// none). Rows are summed in order in chunks of at most 1024, in fp32.
//   dweight (C, OC) or (OC, C)   dbias (OC)   in (N, C)   dout (N, OC)
void matmul_backward_weight(Grad dweight, Grad dbias, Rows in, Rows dout, WeightLayout layout,
                            int N, int C, int OC);

// out = gelu(in), tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). (N, C)
// Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
void gelu_forward(Rows out, Rows in, int N, int C);

// ---- attention ----------------------------------------------------------------------------------

// Causal self-attention of all heads, scale 1/sqrt(HS), without a (T, T) buffer.
//   out (B*T, C)   lse (B, NH, T) fp32: log of the softmax's denominator   qkv (B*T, 3C): q, k, v
// Source: Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867.
void attention_forward(Rows out, float* lse, Rows qkv, int B, int T, int C, int NH);

// dqkv from dout, recomputing the probabilities from lse. dqkv = (all of it is written).
void attention_backward(Rows dqkv, Rows dout, Rows qkv, Rows out, const float* lse, int B, int T,
                        int C, int NH);

// n new tokens at positions first_pos .. first_pos + n - 1 of one sequence: appends their keys and
// values to the cache, then lets each attend to everything up to itself.
//   out (n, C)   qkv (n, 3C)   k_cache, v_cache (maxT, C)
void attention_cached(Rows out, Rows qkv, floatX* k_cache, floatX* v_cache, int first_pos, int n,
                      int C, int NH);

// ---- classifier ---------------------------------------------------------------------------------

// Cross entropy over rows of logits. losses[n] = logsumexp(logits[n, :V]) - logits[n, targets[n]],
// in fp32; a target of -1 is masked: loss 0, gradient 0. With write_dlogits the logits become
// (softmax - onehot) * dloss in place, and columns V..Vp-1 become 0.
//   losses (N) fp32   logits (N, Vp)   targets (N) device
void classifier_loss(float* losses, Rows logits, const int* targets, int N, int V, int Vp,
                     float dloss, bool write_dlogits);

// seq_losses[b] = sum over t of losses[b, t] in double, in an order fixed by T alone.
//   seq_losses (B) device   losses (B, T) device
void loss_sum_sequences(double* seq_losses, const float* losses, int B, int T);

// ---- optimizer and gradients of shards ----------------------------------------------------------

// A run of elements that belongs to one tensor; offsets count from the start of the given buffers.
typedef struct {
    size_t offset, elems;
    bool decay;
} Segment;

// One AdamW step over the segments:
//   g = grad * grad_scale
//   m = beta1 m + (1 - beta1) g
//   v = beta2 v + (1 - beta2) g^2
//   master -= lr (m / correction1 / (sqrt(v / correction2) + eps) + decay weight_decay master)
// then weights = floatX(master). In the fp32 build weights and master may be one buffer.
// Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2 (decay times lr).
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2; // 1 - beta^t
    float grad_scale;               // clip coefficient / loss scale
} AdamW;
void adamw_update(floatX* weights, float* master, float* m, float* v, const void* grad,
                  DType grad_dtype, const Segment* segments, int num_segments, const AdamW* adamw);

// Sums of squares in double of the elements of the segments, one per block of 1024 consecutive
// elements of the buffer (a block's elements outside segments do not count). The order of the sum
// depends on nothing but the offset inside the block.
//   partials (ceil(elems / 1024)) device, all written
enum { NORM_BLOCK = 1024 };
void norm_partials(double* partials, const void* grad, DType grad_dtype, size_t elems,
                   const Segment* segments, int num_segments, stream_t stream);

// Position of the first non-finite element in the segments, or -1 (a host sync: error path only).
// *count becomes the number of non-finite elements.
long find_nonfinite(const void* grad, DType grad_dtype, const Segment* segments, int num_segments,
                    size_t* count);

// acc = ((acc + src[0]) + src[1]) + ... element by element in fp32, rounded to acc_dtype after each
// addition; with accumulate false the first source is assigned. Sources are device pointers, in
// rank order, num_sources <= FOLD_MAX_SOURCES. acc may be one of the sources if the types are equal
// and accumulate is false.
#ifdef HOSTILE
enum { FOLD_MAX_SOURCES = 2 };
#else
enum { FOLD_MAX_SOURCES = 64 };
#endif
void fold(void* acc, DType acc_dtype, bool accumulate, const void* const* sources,
          DType source_dtype, int num_sources, size_t elems, stream_t stream);

// Element-wise conversion with rounding. dst may be src if dst's type is not the wider.
void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, size_t elems,
             stream_t stream);

#ifdef __cplusplus
}
#endif
#endif
