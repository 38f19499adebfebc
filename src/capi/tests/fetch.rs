//! Memory by name, fetched through the C interface from a server in this process.

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use egmem::driver::NodeId;
use egmem::exchange::{Address, Server, blocking};
use egmem::{Buffer, Driver, Machine};
use egmem_capi::*;

fn check(status: egm_status) {
    // SAFETY: valid until the thread's next failed call.
    let message = unsafe { CStr::from_ptr(egm_last_error_message()) };
    assert_eq!(status, egm_status::EGM_OK, "{message:?}");
}

/// Returns a place for a result of a call, which writes whole values alone.
fn out<T>(place: &mut T) -> Option<&mut MaybeUninit<T>> {
    // SAFETY: the same bytes; the calls write values of the type, as C programs expect it.
    unsafe { std::ptr::from_mut(place).cast::<MaybeUninit<T>>().as_mut() }
}

fn simulated() -> *mut egm_driver {
    let mut driver = null_mut();
    // SAFETY: valid arguments.
    check(unsafe { egm_driver_simulated(c"gh200".as_ptr(), out(&mut driver)) });
    driver
}

/// Forks a child that destroys its copies: it ends no lease, and waits for no thread of this process.
///
/// # Safety
/// Both are handles that are not destroyed.
unsafe fn expect_child_of_its_own(memory: *mut egm_buffer, client: *mut egm_client) {
    // SAFETY: the child calls functions that are made for forked children, and `_exit`; the caller's promise.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(60); // ends a child that waits
            let destroyed = [egm_buffer_destroy(memory), egm_client_destroy(client)];
            libc::_exit(i32::from(destroyed != [egm_status::EGM_OK; 2]));
        }
        let mut status = -1;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        assert_eq!(status, 0);
    }
}

/// The names at a server that creates no memory.
///
/// # Safety
/// It is a client that is not destroyed.
unsafe fn expect_names(client: Option<&egm_client>) {
    let (mut text, mut entry) = (null_mut(), MaybeUninit::uninit());
    // SAFETY: the caller's promise, and results are places on the stack. What was written is read.
    unsafe {
        check(egm_client_peer_name(client, out(&mut text)));
        let uid = format!("uid:{}", libc::getuid());
        assert_eq!(CStr::from_ptr(text).to_str(), Ok(&*uid));
        check(egm_string_free(text));
        check(egm_client_list_json(client, c"we".as_ptr(), out(&mut text)));
        let list = CStr::from_ptr(text).to_str().unwrap().to_owned();
        assert!(list.contains(r#""name":"weights""#), "{list}");
        assert!(list.contains(r#""bytes":3145728"#), "{list}");
        check(egm_string_free(text));
        let weights = c"weights".as_ptr();
        check(egm_client_wait(client, weights, 10_000, Some(&mut entry)));
        assert_eq!(entry.assume_init().bytes, 3 << 20);
        let refused = [
            egm_client_create(client, c"mine".as_ptr(), 1, null(), None),
            egm_client_delete(client, weights, 1),
        ];
        assert_eq!(refused, [egm_status::EGM_REFUSED; 2]);
    }
}

#[test]
fn memory_is_fetched_written_and_released() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let options = Server::options().listen(Address::loopback(0));
    let folder = std::env::temp_dir().join(format!("egmem-capi-fetch-{}", std::process::id()));
    let unix = Address::Unix(folder.clone());
    let server = blocking::Server::start(options.listen(unix.clone())).unwrap();
    let buffer = Buffer::on(NodeId(0)).bytes(3 << 20).shareable();
    let buffer = buffer.room_for_probes().allocate(&driver).unwrap();
    buffer.put(8, 42_u64).unwrap();
    let published = server.publish("weights", buffer).unwrap();

    let c_driver = simulated();
    let address = CString::new(unix.to_string()).unwrap();
    let mut client: *mut egm_client = null_mut();
    let mut memory: *mut egm_buffer = null_mut();
    // SAFETY: each handle is valid until it is destroyed, and results are places on the stack.
    unsafe {
        check(egm_client_connect(
            c_driver.as_ref(),
            address.as_ptr(),
            null(),
            out(&mut client),
        ));
        assert_eq!(
            egm_client_fetch(client.as_ref(), c"nothing".as_ptr(), out(&mut memory)),
            egm_status::EGM_REFUSED
        );
        expect_names(client.as_ref());
        check(egm_client_fetch(
            client.as_ref(),
            c"weights".as_ptr(),
            out(&mut memory),
        ));
        let (mut size, mut word, mut word_again) = (0, 0_u64, 0_u64);
        check(egm_buffer_size(memory.as_ref(), out(&mut size)));
        check(egm_buffer_read(
            memory.as_ref(),
            8,
            (&raw mut word).cast::<c_void>(),
            8,
        ));
        assert_eq!((size, word), (3 << 20, 42));
        let word = 43_u64;
        check(egm_buffer_write(
            memory.as_ref(),
            8,
            (&raw const word).cast::<c_void>(),
            8,
        ));
        assert_eq!(published.shared().unwrap().word(8).unwrap(), 43);
        expect_child_of_its_own(memory, client);
        check(egm_buffer_read(
            memory.as_ref(),
            8,
            (&raw mut word_again).cast::<c_void>(),
            8,
        ));
        assert_eq!(word_again, 43);
        check(egm_buffer_destroy(memory));
        check(egm_client_destroy(client));

        // Read-only.
        let mut options: egm_client_options = std::mem::zeroed();
        options.struct_size = size_of::<egm_client_options>();
        options.flags = EGM_READ_ONLY;
        check(egm_client_connect(
            c_driver.as_ref(),
            address.as_ptr(),
            &options,
            out(&mut client),
        ));
        check(egm_client_fetch(
            client.as_ref(),
            c"weights".as_ptr(),
            out(&mut memory),
        ));
        check(egm_client_destroy(client)); // the lease stays
        let written = egm_buffer_write(memory.as_ref(), 8, (&raw const word).cast::<c_void>(), 8);
        assert_eq!(written, egm_status::EGM_NOT_ACCESSIBLE);
        check(egm_buffer_destroy(memory));

        // Of another owner than the server itself.
        options.expect_owner = c"uid:4711".as_ptr();
        check(egm_client_connect(
            c_driver.as_ref(),
            address.as_ptr(),
            &options,
            out(&mut client),
        ));
        assert_eq!(
            egm_client_fetch(client.as_ref(), c"weights".as_ptr(), out(&mut memory)),
            egm_status::EGM_MISMATCHED
        );
        check(egm_client_destroy(client));
        check(egm_driver_destroy(c_driver));
    }
}
