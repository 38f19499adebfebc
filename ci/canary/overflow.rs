//! Reads one byte past an allocation.
fn main() {
    let bytes = std::hint::black_box(vec![1_u8; 100]);
    // SAFETY: none, on purpose.
    let past = unsafe { bytes.as_ptr().add(bytes.len()).read_volatile() };
    println!("{past}");
}
