use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use super::*;

fn place() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn folder(place: &Path) -> Folder {
    Folder::create(place, InstanceId::random().unwrap()).unwrap()
}

/// Leaves a folder as a kill does: the kernel closes the lock and the socket, the files stay.
fn killed(place: &Path) -> PathBuf {
    let folder = folder(place);
    drop(UnixListener::bind(folder.path.join(FD_SOCKET)).unwrap());
    forget(folder)
}

fn forget(mut folder: Folder) -> PathBuf {
    drop(folder.lock.take().expect("locked"));
    let path = std::mem::take(&mut folder.path);
    std::mem::forget(folder);
    path
}

#[test]
fn of_the_dead_and_the_living_only_the_dead_ones_go() {
    let place = place();
    let dead = [
        killed(place.path()),
        // Killed before it listened.
        forget(folder(place.path())),
    ];
    let early = folder(place.path());
    let living = folder(place.path());
    let _fd_socket = UnixListener::bind(living.path().join(FD_SOCKET)).unwrap();
    assert_eq!(sweep(place.path()), 2);
    assert!(dead.iter().all(|path| !path.exists()));
    assert!(living.path().join(FD_SOCKET).exists() && early.path().exists());
    assert_eq!(sweep(place.path()), 0);
    drop((early, living));
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
}

#[test]
fn a_folder_that_no_server_made_stays() {
    let place = place();
    let elsewhere = self::place();
    let aside = killed(elsewhere.path());
    symlink(
        &aside,
        Folder::path_in(place.path(), InstanceId::from_bytes([7; 16])),
    )
    .unwrap();
    // Renamed: not one of our names.
    let other = elsewhere.path().join("other");
    fs::rename(killed(elsewhere.path()), &other).unwrap();
    fs::rename(&other, place.path().join("egmem-other")).unwrap();
    let with_more = killed(place.path());
    fs::write(with_more.join("precious"), "").unwrap();
    let without_lock = killed(place.path());
    fs::remove_file(without_lock.join(LOCK)).unwrap();
    let linked_lock = killed(place.path());
    fs::rename(linked_lock.join(LOCK), elsewhere.path().join(LOCK)).unwrap();
    symlink(elsewhere.path().join(LOCK), linked_lock.join(LOCK)).unwrap();
    let linked_fd_socket = killed(place.path());
    fs::remove_file(linked_fd_socket.join(FD_SOCKET)).unwrap();
    symlink(aside.join(FD_SOCKET), linked_fd_socket.join(FD_SOCKET)).unwrap();
    let no_socket = killed(place.path());
    fs::remove_file(no_socket.join(FD_SOCKET)).unwrap();
    fs::write(no_socket.join(FD_SOCKET), "").unwrap();
    let of_before = killed(place.path());
    let boot = BootId::from_bytes([7; 16]).to_string();
    fs::write(of_before.join(LOCK), boot).unwrap();
    let others_write = killed(place.path());
    fs::set_permissions(&others_write, fs::Permissions::from_mode(0o770)).unwrap();
    // A process listens, though none holds the lock.
    let heard = killed(place.path());
    fs::remove_file(heard.join(FD_SOCKET)).unwrap();
    let _fd_socket = UnixListener::bind(heard.join(FD_SOCKET)).unwrap();
    fs::write(
        Folder::path_in(place.path(), InstanceId::from_bytes([8; 16])),
        "",
    )
    .unwrap();

    let before = fs::read_dir(&place).unwrap().count();
    assert_eq!(sweep(place.path()), 0);
    assert_eq!(fs::read_dir(&place).unwrap().count(), before);
    assert!(aside.join(FD_SOCKET).exists() && with_more.join("precious").exists());
    assert_eq!(sweep(&place.path().join("nowhere")), 0);
}

/// Only for root: other users cannot create another user's folder.
#[test]
fn another_users_folder_stays() {
    let place = place();
    let dead = killed(place.path());
    if std::os::unix::fs::chown(&dead, Some(65_534), None).is_ok() {
        assert_eq!(sweep(place.path()), 0);
        assert!(dead.join(FD_SOCKET).exists());
        std::os::unix::fs::chown(&dead, Some(rustix::process::geteuid().as_raw()), None).unwrap();
    }
    assert_eq!(sweep(place.path()), 1);
}

/// In every interleaving of a creation and a sweep, the folder of a live server stays.
#[test]
fn a_folder_that_is_being_made_stays() {
    let place = place();
    let stop = AtomicBool::new(false);
    let passes = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let sweeping = scope.spawn(|| {
            let mut swept = 0;
            while !stop.load(SeqCst) {
                swept += sweep(place.path());
                passes.fetch_add(1, SeqCst);
            }
            swept
        });
        let mut all_there = true;
        for _ in 0..100 {
            let folder = folder(place.path());
            // One pass that began during the creation, and a complete one.
            let enough = passes.load(SeqCst) + 2;
            while passes.load(SeqCst) < enough && !sweeping.is_finished() {
                std::thread::yield_now();
            }
            all_there &= folder.path().exists();
        }
        stop.store(true, SeqCst);
        assert_eq!(sweeping.join().unwrap(), 0);
        assert!(all_there);
    });
}
