//! Methods that make one call each.

/// Defines methods that return the results of one call of `this.api`:
/// `[kind] method(arguments) -> result { let …; @place(…) function(values) => result expression }`.
///
/// The place is a method of the API's state, which runs the call in the context that it needs. The values are safe
/// expressions: the macro evaluates them in the `unsafe` block of the call.
macro_rules! methods {
    (|$this:ident| $(
        [$($kind:tt)+] $method:ident($($arg:ident: $ty:ty),*) -> $out:ty {
            $(let $var:pat = $init:expr;)*
            @$place:ident($($at:expr)?) $function:ident($($value:expr),*) => $result:expr
        }
    )*) => {$(
        $($kind)+ $method(&self, $($arg: $ty),*) -> $crate::Result<$out> {
            let $this = self;
            $(let $var = $init;)*
            // SAFETY: pointers are to live values of the types in CUDA's headers. The call fills or reads them
            // before it returns and does not keep them. Lengths and counts are those of the values they go with.
            // A `void` pointer leads to a value at least as wide as the attribute or handle type. Texts end with
            // a NUL. Flags are 0 or CUDA's own. The driver checks numbers and handles, and looks addresses up
            // without following them. The caller guarantees, by the contract of `Backend` and `PoolCalls`, that
            // handles are live, that work is in bounds, and that nothing uses memory that a call removes. The
            // caller of a launch also guarantees the number and widths of its arguments.
            $this.$place($($at,)? || unsafe { $this.api.$function($($value),*) })?;
            Ok($result)
        }
    )*};
}

pub(super) use methods;
