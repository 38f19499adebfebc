//! Macros for patterns that repeat in this crate and in those above it.

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

/// Defines an error's messages, for a `Display` that escapes them, and its remedies: `pattern => (message), remedy;`.
#[macro_export]
macro_rules! error_texts {
    ($error:ty { $($pattern:pat => ($($message:tt)+), $remedy:expr;)* }) => {
        impl $error {
            fn describe(&self, f: &mut $crate::text::Escaping<'_, '_>) -> std::fmt::Result {
                match self {
                    $($pattern => std::fmt::Write::write_fmt(f, format_args!($($message)+)),)*
                }
            }

            /// Returns what to do about it, in a sentence; nothing where the text says it.
            #[allow(unused_variables)] // most are in the message alone; `_field`: in the remedy alone
            pub fn remedy(&self) -> &'static str {
                match self {
                    $($pattern => $remedy,)*
                }
            }
        }
    };
}

/// Defines what to do about each cause of an error.
#[macro_export]
macro_rules! remedies {
    ($cause:ty { $($variant:pat => $remedy:expr,)* }) => {
        impl $cause {
            pub(super) const fn remedy(self) -> &'static str {
                match self {
                    $($variant => $remedy,)*
                }
            }
        }
    };
}
