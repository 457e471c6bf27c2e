// train/version.c - filled in by the Makefile.
#include "train/version.h"

const char* const version_text = GIT_VERSION;
const char* const version_variant = VARIANT;
