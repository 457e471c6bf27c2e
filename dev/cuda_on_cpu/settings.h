// settings.h - what the environment variables CUDA_ON_CPU_* ask for; README.md lists them.
#ifndef EMU_SETTINGS_H
#define EMU_SETTINGS_H

#include <stddef.h>

namespace emu {

enum Order { FORWARD, REVERSE, RANDOM };              // threads of a block, blocks of a grid
enum Lazy { EAGER, ON_DEMAND, AHEAD, RANDOM_STREAM }; // when and in which order streams run

struct Settings {
    Order order = FORWARD;
    unsigned order_seed = 0;
    Lazy lazy = EAGER;
    unsigned lazy_seed = 0;
    bool poison = false;       // fresh device, pinned and shared memory holds NaN
    bool hide = true;          // device memory is out of reach while host code runs
    bool copies_early = false; // cp.async at the call, not at the wait
    int devices = 1;
    size_t memory_bytes = size_t(8) << 30;   // of the device
    size_t shared_bytes = size_t(227) << 10; // that a block may ask for
    long drop_wait = 0;                      // ignore the i-th wait for an event, counted from 1
    long drop_edge = 0;        // ignore every wait of the i-th pair (event, waiting stream)
    bool no_epilogues = false; // cublasLt has no algorithm for fused epilogues
    bool no_products = false;  // nor for anything else
    bool late_refusal = false; // it has, and cublasLtMatmul does not take it
    bool list_edges = false;
    bool profile = false;
};

// Read once, before main() runs any device code. A variable that is unknown or has a wrong value
// ends the process with exit code 2.
const Settings& settings();

} // namespace emu

#endif
