// zero/zero.h - the sharding engine: who holds, gathers, reduces and updates which elements.
//
// It knows units, ranks and bytes, never what a tensor means. Stages are three switches over one
// engine: weights, gradient accumulators and optimizer state are each full or sharded.
//
//   stage | weights | accumulators | optimizer state
//     0   | full    | full         | full
//     1   | full    | full         | 1/N
//     2   | full    | 1/N          | 1/N
//     3   | 1/N     | 1/N          | 1/N
//
// Verbs: gather / release a unit's weights (FSDP says unshard / reshard).
// Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054.
#ifndef ZERO_ZERO_H
#define ZERO_ZERO_H

#include "backend/comm.h"
#include "backend/ops.h"
#include "core/ledger.h"
#include "core/params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int stage;            // 0..3
    bool exact;           // --reduce exact: canonical order, same bits for every stage and N
    DType accum_dtype;    // fp32, or floatX with --accum-dtype same
    int grad_accum_steps; // G
    int world_size, rank;
    bool training; // false: weights only (evaluation, prompt)
} ZeroConfig;

typedef struct Zero Zero;

// Adds the engine's lines to the plan: "weights", "grads", "optimizer", and of the transient kind
// "weight_slots", "embedding_weights", "grad_slots", "embedding_grad", "exchange", "norm_partials",
// "step_message", each where it is needed.
void zero_plan(const ZeroConfig* config, const ParamTable* table, Ledger* ledger);

// Elements of all units with padding: the "padded_parameters" of the plan.
size_t zero_padded_params(const ParamTable* table, int world_size);

// Elements and bytes that this rank sends per step, as planned: weights and gradients only.
void zero_traffic(const ZeroConfig* config, const ParamTable* table, size_t* elements,
                  size_t* bytes);

// Communication of a step if every rank's link carries link_gb_s (1e9 bytes a second), beside
// compute of compute_ms per step: what of it can hide behind compute, and what cannot.
typedef struct {
    double gather_ms;  // weights, forward and backward of all micro-steps
    double reduce_ms;  // gradients
    double publish_ms; // after the update
    double exposed_ms; // no compute to hide behind: first and last unit, and what exceeds compute
} ZeroPrediction;
ZeroPrediction zero_predict(const ZeroConfig* config, const ParamTable* table, double link_gb_s,
                            double compute_ms);

// Of everything that must be the same on all ranks: stage, mode, types, units and tensors.
uint64_t zero_config_hash(const ZeroConfig* config, const ParamTable* table);

// Takes the plan's memory. Weights are undefined until zero_init_weights, or zero_write and
// zero_publish.
Zero* zero_create(const ZeroConfig* config, const ParamTable* table, Comm* comm, Ledger* ledger);
void zero_destroy(Zero* zero);

// ---- weights ------------------------------------------------------------------------------------

// A unit's full weights for the compute stream, valid until zero_release. Gathering a unit that is
// already held without a release in between dies.
const floatX* zero_gather(Zero* zero, int unit);
// Starts bringing the unit; a hint that never changes results. -1 is ignored.
void zero_prefetch(Zero* zero, int unit);
void zero_release(Zero* zero, int unit);
// Forgets gathered copies, so that the next gather brings them anew (after evaluation).
void zero_drop_slots(Zero* zero);

// ---- gradients ----------------------------------------------------------------------------------

// Begin a micro-step (0 .. G-1) of step `step` (from 1), before its forward pass.
void zero_begin_micro_step(Zero* zero, long step, int micro);
// Where the unit's gradient goes in this micro-step; zero_grad_end launches what is due.
Grad zero_grad_begin(Zero* zero, int unit);
void zero_grad_end(Zero* zero, int unit);

// ---- the step's one message ---------------------------------------------------------------------

// What each rank tells the others once per step, and what all know afterwards.
typedef struct {
    double loss;        // mean over the global batch; from seq sums in canonical order
    double grad_norm;   // before clipping, loss scale divided out; not finite if nonfinite
    bool nonfinite;     // a gradient or the loss is not finite
    int nonfinite_rank; // whose micro-batch made it, where that can be told, else the lowest rank
                        // that owns a bad element; -1: only the loss is bad
    char nonfinite_tensor[40];
    size_t nonfinite_count;
    int signal; // a signal that some rank has received, else 0
} StepMessage;

// Completes the reductions, then one message. micro_losses (G) device: sum of this rank's token
// losses per micro-step; tokens: of the global batch; loss_scale: the one backward used.
// The only host sync of a step.
StepMessage zero_grad_norm(Zero* zero, const double* micro_losses, size_t tokens, double loss_scale,
                           int signal);

// AdamW on this rank's elements, then publishes the weights. adamw.grad_scale = clip / loss scale.
void zero_step(Zero* zero, const AdamW* adamw);
// Ends a step without an update: weights and state stay as they are.
void zero_skip(Zero* zero);

// ---- state: initialisation, checkpoint, hash ----------------------------------------------------

typedef enum { STATE_MASTER, STATE_M, STATE_V } StateKind;

// Each rank fills its own elements; m and v become 0. fill(out, table, tensor, first, count, seed).
void zero_init_weights(Zero* zero,
                       void (*fill)(float*, const ParamTable*, int, size_t, size_t, uint64_t),
                       uint64_t seed);

// Elements [first, first + count) of a tensor's fp32 state, to `out` on rank 0 (others pass NULL).
// Collective. zero_write is the reverse: `in` on rank 0 is scattered. count <= ZERO_IO_ELEMS.
enum { ZERO_IO_ELEMS = 4 << 20 };
void zero_read(Zero* zero, StateKind kind, int tensor, size_t first, size_t count, float* out);
void zero_write(Zero* zero, StateKind kind, int tensor, size_t first, size_t count,
                const float* in);
// After the masters were written: working weights from masters, on all ranks.
void zero_publish(Zero* zero);

// A fingerprint of the masters, the same on all ranks: the sum modulo 2^64, over all weights
// without padding, of mix64(i * 0x9E3779B97F4A7C15 + bits), i the element's index in the order of
// the table and bits its fp32 value as a uint32.
uint64_t zero_params_hash(Zero* zero);

// Elements and bytes of weights and gradients sent since the last call: one step's.
void zero_take_counters(Zero* zero, size_t* elements, size_t* bytes);

#ifdef __cplusplus
}
#endif
#endif
