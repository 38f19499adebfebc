//! Macros for what repeats in this crate and in those above it.

/// Implements `Display` for an enum by a text for each variant.
#[macro_export]
macro_rules! display_texts {
    ($type:ty { $($variant:pat => $text:expr,)* }) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $($variant => $text,)*
                })
            }
        }
    };
}

/// Returns an error from the calling function for the first condition that holds:
/// `refuse! { error; condition => "format", values; … }`, where `error` makes an error of a text.
#[macro_export]
macro_rules! refuse {
    ($error:expr; $($condition:expr => $why:literal $(, $value:expr)*;)*) => {{
        let error = $error;
        $(if $condition {
            return Err(error(format_args!($why $(, $value)*).to_string()));
        })*
    }};
}

/// Defines the setters of options that are built by value: `name(value: Type) => field = expression;`.
#[macro_export]
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($($value:ident: $type:ty)?) => $($field:ident).+ = $new:expr;)*) => {$(
        $(#[$doc])*
        pub const fn $name(mut self $(, $value: $type)?) -> Self {
            self.$($field).+ = $new;
            self
        }
    )*};
}
