// train/version.h - what this binary is.
#ifndef TRAIN_VERSION_H
#define TRAIN_VERSION_H

#ifdef __cplusplus
extern "C" {
#endif

extern const char* const version_text;    // "1.0-12-gabc1234"
extern const char* const version_variant; // "cpu-fp32", the folder under build/

#ifdef __cplusplus
}
#endif
#endif
