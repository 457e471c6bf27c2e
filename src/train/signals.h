// train/signals.h - SIGINT, SIGTERM and SIGUSR1 as a flag that the step's message carries.
//
// The first signal asks the run to save and stop after the current step, together on all ranks; a
// second one ends this process at once. SIGXFSZ is ignored, so that a file size limit reads as a
// write error instead of killing the run.
#ifndef TRAIN_SIGNALS_H
#define TRAIN_SIGNALS_H

#ifdef __cplusplus
extern "C" {
#endif

void signals_install(void);

// The first signal received so far, or 0.
int signals_received(void);

#ifdef __cplusplus
}
#endif
#endif
