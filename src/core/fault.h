// core/fault.h - faults on purpose, from the environment: ZERO_FAULT and ZERO_DEBUG.
//
// Always compiled in, so that the binary that is tested is the one that is used; the start table
// shows what is set. ZERO_FAULT=KIND[:rank=R][:step=S][:seq=K][:tensor=NAME][:ms=M]
#ifndef CORE_FAULT_H
#define CORE_FAULT_H

#include <stdbool.h>
#include "core/check.h"
#include "core/params.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    FAULT_NONE,
    FAULT_NAN,      // a NaN in the gradient of a tensor, on one rank at one step
    FAULT_SKIP,     // one rank leaves out its collective number seq
    FAULT_COUNT,    // one rank passes a wrong element count to its collective number seq
    FAULT_DELAY,    // one rank sleeps `ms` before each collective (or only number seq)
    FAULT_STOP,     // one rank stops itself (SIGSTOP) at a step
    FAULT_KILLSAVE, // SIGKILL in the middle of a save
    FAULT_LINK,     // what one rank sends when links are tested is wrong or, with `ms`, late
} FaultKind;

// Reads and checks both variables once; bad text is an error of the user.
bool fault_init(int rank, Error* error);
// Are there such a rank and such a tensor? A fault that cannot happen would pass for one survived.
bool fault_check(const ParamTable* table, int world_size, Error* error);

// "nan:rank=1:step=3" as given, or "" when nothing is set: for the start table.
const char* fault_description(void);

// True when this rank must commit the fault of that kind now. A field that was not given matches
// everything; pass -1 for what does not apply here.
bool fault_now(FaultKind kind, long step, long seq);
const char* fault_tensor(void); // "" when not given
int fault_delay_ms(void);

// ZERO_DEBUG=poison: fresh and released buffers are filled with NaN.
bool debug_poison(void);

#ifdef __cplusplus
}
#endif
#endif
