// train/tokenizer.h - token ids to text, and for byte-level models text to ids.
//
// With V <= 257 ids are bytes and 256 ends a text. Larger vocabularies are decoded with llm.c's
// gpt2_tokenizer.bin where it is found; where it is not, ids are printed. There is no encoder for
// them: prompts are given as ids.
#ifndef TRAIN_TOKENIZER_H
#define TRAIN_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "core/check.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int V; // of the model
    bool is_byte_level;
    int num_tokens;      // in the file; 0: no file
    unsigned char* text; // all tokens, one after the other
    uint32_t* offsets;   // (num_tokens + 1) where each begins
} Tokenizer;

#define TOKENIZER_FILE "gpt2_tokenizer.bin"

// path NULL: looks for TOKENIZER_FILE beside the shards of `train_data`, then in the current
// folder; found nowhere: there will be no text. A file that is given or found must be whole: code 2
// with path, field and value.
bool tokenizer_open(Tokenizer* tokenizer, const char* path, const char* train_data, int V,
                    Error* error);
void tokenizer_close(Tokenizer* tokenizer);

bool tokenizer_has_text(const Tokenizer* tokenizer); // false: decode gives ids

// The bytes of one token; *length may be 0 (end of a byte-level text). Needs tokenizer_has_text.
const unsigned char* tokenizer_token(const Tokenizer* tokenizer, int id, size_t* length);

// All tokens as one NUL-terminated text to be freed; NUL bytes are left out, and what is not UTF-8
// becomes U+FFFD. Without a vocabulary the ids with spaces between.
char* tokenizer_decode(const Tokenizer* tokenizer, const int* ids, int num_ids);

// What a training sample starts from: end of text, for byte-level models a newline.
int tokenizer_start_token(const Tokenizer* tokenizer);

// The ids of --prompt or --prompt-tokens ("ID,ID,..."), whichever is not NULL, in an array to be
// freed; NULL with `error` set (code 2): no encoder, an id >= V, an empty prompt.
int* tokenizer_prompt(const Tokenizer* tokenizer, const char* prompt, const char* prompt_tokens,
                      int* num_ids, Error* error);

#ifdef __cplusplus
}
#endif
#endif
