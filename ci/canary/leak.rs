//! Loses an allocation.
fn main() {
    std::mem::forget(std::hint::black_box(Box::new([1_u8; 100])));
}
