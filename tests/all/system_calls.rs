//! System calls that the kernel refuses from now on, as to a program in a container.

/// Offsets in a filter's input: the call's number, and the low words of two arguments of `mmap`.
const NUMBER: u32 = 0;
const PROTECTION: u32 = 16 + 2 * 8;
const FLAGS: u32 = 16 + 3 * 8;

const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
const EQUALS: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
const HAS_BITS: u32 = libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K;
const RETURN: u32 = libc::BPF_RET | libc::BPF_K;

const fn statement(code: u32, yes: u8, no: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: yes,
        jf: no,
        k,
    }
}

const ALLOW: libc::sock_filter = statement(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW);

const fn answer(code: i32) -> libc::sock_filter {
    statement(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | code as u32)
}

/// From now on the kernel answers these calls of all of this process's threads with EPERM. Returns whether that could be done:
/// an emulator's kernel knows no filters.
pub fn refuse(calls: &[libc::c_long]) -> bool {
    let mut filter = vec![statement(LOAD, 0, 0, NUMBER)];
    for &call in calls {
        filter.push(statement(EQUALS, 0, 1, call as u32));
        filter.push(answer(libc::EPERM));
    }
    filter.push(ALLOW);
    install(&mut filter, libc::SECCOMP_FILTER_FLAG_TSYNC)
}

/// From now on the kernel has no room for the calling thread's mappings without pages in place of others (`mmap` with `MAP_FIXED`
/// and `PROT_NONE`), as at `vm.max_map_count`. Returns whether that could be done.
pub fn refuse_clearing() -> bool {
    let mut filter = [
        statement(LOAD, 0, 0, NUMBER),
        statement(EQUALS, 0, 5, libc::SYS_mmap as u32),
        statement(LOAD, 0, 0, PROTECTION),
        statement(EQUALS, 0, 3, libc::PROT_NONE as u32),
        statement(LOAD, 0, 0, FLAGS),
        statement(HAS_BITS, 0, 1, libc::MAP_FIXED as u32),
        answer(libc::ENOMEM),
        ALLOW,
    ];
    install(&mut filter, 0)
}

fn install(filter: &mut [libc::sock_filter], flags: libc::c_ulong) -> bool {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the first takes numbers alone; the second reads the program, which lives until after the call.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(libc::SYS_seccomp, mode, flags, &program) == 0
    }
}
