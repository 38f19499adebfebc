//! Methods of options that only set a field.

/// Defines methods that set the field of the same name: `field: Type;`.
macro_rules! setters {
    ($($(#[$doc:meta])* $field:ident: $type:ty;)*) => {$(
        $(#[$doc])*
        pub fn $field(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }
    )*};
}
pub(crate) use setters;
