// train/watchdog.h - names the rank that does not come, instead of a silent hang.
//
// A thread of its own looks at the table of the host's ranks (backend/comm/table.h). When a
// collective has waited longer than the time-out and no rank has shown progress for as long, one
// line names the rank that has not come and where the others wait, and the process leaves with exit
// code 5; the launcher ends the rest. The thread calls neither MPI nor NCCL. Across hosts each
// reports its own.
#ifndef TRAIN_WATCHDOG_H
#define TRAIN_WATCHDOG_H

#include "backend/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

void watchdog_start(Comm* comm, int timeout_seconds);
void watchdog_stop(void);

// What this rank does outside collectives ("saving step 20"; "" when done), shown to the others.
// Each call is a sign of life, and so is each tick: call it for every MiB of work.
void watchdog_activity(const char* what);
void watchdog_tick(void);

#ifdef __cplusplus
}
#endif
#endif
