//! Enums that are one byte on the wire.

/// Defines an enum with a number for each variant, and `from_code`, which finds the variant of a number.
macro_rules! codes {
    ($(#[$of_enum:meta])* $vis:vis enum $name:ident { $($(#[$of_variant:meta])* $variant:ident = $code:literal,)* }) => {
        $(#[$of_enum])*
        #[repr(u8)]
        $vis enum $name { $($(#[$of_variant])* $variant = $code,)* }

        impl $name {
            #[inline]
            const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

pub(crate) use codes;
