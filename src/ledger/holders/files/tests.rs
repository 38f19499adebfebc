//! Mappings and mounts of made processes.

use super::*;

#[test]
fn mappings_are_told_apart() {
    let text = "\
        200000000-200200000 rw-s 00000000 00:06 506                        /dev/nvidiactl\n\
        200200000-200400000 ---s 00000000 00:06 506                        /dev/nvidiactl\n\
        200600000-200800000 rw-s 00000000 00:06 506                        /dev/nvidiactl (deleted)\n\
        200400000-200401000 rw-s 00000000 00:06 512                        /dev/nvidia0\n\
        7f0000000000-7f0000800000 rw-s 00000000 00:06 520                  /dev/nvidia-uvm\n\
        7f0001000000-7f0001100000 rw-s 00000000 00:01 9                    /memfd:a b (deleted)\n\
        7f0002000000-7f0002100000 r--s 00100000 00:01 9                    /memfd:a b (deleted)\n\
        7f0003000000-7f0003001000 rw-s 00000000 00:1b 10                   /dev/shm/torch_1\n\
        7f0003200000-7f0003600000 rw-s 00000000 00:11 12                   /anon_hugepage (deleted)\n\
        7f0003600000-7f0003800000 rw-p 00000000 00:11 13                   /anon_hugepage (deleted)\n\
        7f0004000000-7f0004001000 r-xp 00000000 08:01 11                   /opt/lib/libtorch_cuda.so\n\
        7f0005000000-7f0005001000 rw-p 00000000 00:00 0 \n\
        7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0                    [stack]\n\
        nonsense /dev/nvidiactl\n";
    let maps = Maps::parse(text.as_bytes());
    assert_eq!((maps.driver, maps.managed), (4 << 20, 8 << 20));
    assert!(maps.has_device && maps.has_torch && !maps.has_cupy);
    let shared = maps.shared.values();
    let mut shared: Vec<_> = shared.map(|shared| shared.addresses).collect();
    shared.sort_unstable();
    assert_eq!(shared, [4096, 2 << 20, 4 << 20]);
    let memfd = &maps.shared[&(1, 9)];
    assert_eq!(memfd.range, "7f0001000000-7f0001100000");
    assert!(!memfd.is_unnamed);
}

#[test]
fn pages_are_counted_by_node() {
    let text = "\
        7f00 default file=/dev/nvidiactl mapped=512 N0=500 N2=12 kernelpagesize_kB=64\n\
        7f01 bind:1 file=/dev/nvidia-uvm\\040(deleted) mapped=1 N1=1 kernelpagesize_kB=4\n\
        7f02 default file=/dev/nvidia0\n7f03 default heap anon=3 N0=3 kernelpagesize_kB=4\n";
    let expected = [
        (NodeId(0), 500 << 16),
        (NodeId(1), 4096),
        (NodeId(2), 12 << 16),
    ];
    assert_eq!(by_node(text.as_bytes()), BTreeMap::from(expected));
}

proptest::proptest! {
    #[test]
    fn damaged_texts_never_panic(text in "[0-9a-f-]{0,40} ?[rw-]{0,4} ?[0-9:=N ]{0,40}(/dev/nvidiactl|/memfd:x|file=/dev/nvidiactl N1=9)?") {
        let _ = (Maps::parse(text.as_bytes()), by_node(text.as_bytes()));
    }
}
#[test]
fn each_tmpfs_counts_once() {
    let device = fs::metadata("/dev/shm").unwrap().dev();
    // Another filesystem is mounted over the last one.
    let text = "a /dev/shm tmpfs rw 0 0\nb /dev/shm tmpfs rw 0 0\nnone\nc /proc tmpfs rw 0 0\n";
    let found = Tmpfs::of_mounts(text);
    let only = &found.devices - &huge_page_devices();
    assert_eq!(only, HashSet::from([device]));
    let all = Tmpfs::of_this_process();
    assert!(all.devices.contains(&device) && all.bytes.is_some());
}

#[test]
fn memfds_of_huge_pages_are_told_from_others() {
    let device = |flags| {
        let file = rustix::fs::memfd_create("test", flags).ok()?;
        Some(rustix::fs::fstat(file).unwrap().st_dev)
    };
    let counted = Tmpfs::of_this_process().devices;
    let plain = device(MemfdFlags::CLOEXEC).unwrap();
    assert!(!counted.contains(&plain));
    match device(MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) {
        Some(huge) => assert!(counted.contains(&huge)),
        None => println!("skipped: this kernel has no huge pages"),
    }
}
