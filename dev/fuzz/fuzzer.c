// fuzzer.c - libFuzzer's entry to one of the targets of dev/test/fuzz_targets.c; built once per
// target with -DFUZZ_TARGET=index.
#include "fuzz_targets.h"

int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
    fuzz_targets[FUZZ_TARGET].run(bytes, size);
    return 0;
}
