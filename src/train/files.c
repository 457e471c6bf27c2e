// train/files.c - see files.h.
#include "train/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int open_regular(const char* path, uint64_t* bytes, Error* error) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        error_set(error, EXIT_USAGE, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        error_set(error, EXIT_USAGE, "%s: is not a regular file", path);
    } else {
        *bytes = (uint64_t)info.st_size;
        return fd;
    }
    if (fd >= 0) close(fd);
    return -1;
}

bool read_at(int fd, void* out, size_t bytes, uint64_t offset) {
    errno = 0; // stays 0 at the end of the file
    for (size_t have = 0; have < bytes;) {
        ssize_t n = pread(fd, (char*)out + have, bytes - have, (off_t)(offset + have));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        have += (size_t)n;
    }
    return true;
}

char* path_join(char out[PATH_MAX], const char* dir, const char* name) {
    int n = snprintf(out, PATH_MAX, "%s/%s", dir, name);
    CHECK(n >= 0 && n < PATH_MAX, "path too long: %s/%s", dir, name);
    return out;
}
