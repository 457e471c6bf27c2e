// stream.h - what the other parts of the runtime need of streams; enqueue is in emu.h.
#ifndef EMU_STREAM_H
#define EMU_STREAM_H

#include <driver_types.h>

namespace emu {

void synchronize(cudaStream_t stream); // runs what was queued on it; the host comes after that
void synchronize_all();

// Keeps an error for cudaGetLastError and returns it.
cudaError_t set_last_error(cudaError_t error);

} // namespace emu

#endif
