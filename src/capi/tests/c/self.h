/* Runs the test itself in a role, with a variable of the environment set. */
#ifndef SELF_H
#define SELF_H

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* A child that runs this program: it ends when its standard input does. */
struct self {
    pid_t pid;
    int input, errors;
};

static inline struct self run_self(const char *role, const char *variable)
{
    int input[2], errors[2];
    CHECK(pipe(input) == 0 && pipe(errors) == 0);
    struct self self;
    self.pid = fork();
    CHECK(self.pid >= 0);
    if (self.pid == 0) {
        CHECK(dup2(input[0], 0) == 0 && dup2(errors[1], 2) == 2);
        close(input[1]);
        close(errors[0]);
        CHECK(setenv(variable, "1", 1) == 0);
        execl("/proc/self/exe", "self", role, (char *)NULL);
        _exit(127);
    }
    close(input[0]);
    close(errors[1]);
    self.input = input[1];
    self.errors = errors[0];
    return self;
}

/* Ends the child; `told` gets what it has written to standard error, as a string. Returns its status, as of waitpid(). */
static inline int wait_for_self(struct self *self, char *told, size_t size)
{
    size_t have = 0;
    ssize_t got;
    close(self->input);
    while (have + 1 < size && (got = read(self->errors, told + have, size - have - 1)) > 0)
        have += (size_t)got;
    told[have] = 0;
    close(self->errors);
    int status = -1;
    CHECK(waitpid(self->pid, &status, 0) == self->pid);
    return status;
}

/* As wait_for_self(), of a child without a failure. */
static inline void end_self(struct self *self, char *told, size_t size)
{
    int status = wait_for_self(self, told, size);
    if (status != 0)
        fprintf(stderr, "%s", told);
    CHECK(status == 0);
}

/* In the child: waits for end_self(). */
static inline void wait_for_end(void)
{
    char byte;
    CHECK(read(0, &byte, 1) == 0);
}

/* Checks that a text has a word. */
static inline void expect_word(const char *text, const char *word)
{
    if (!strstr(text, word))
        fprintf(stderr, "no \"%s\" in:\n%s\n", word, text);
    CHECK(strstr(text, word));
}

#endif
