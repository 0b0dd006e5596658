//! The values of a script.

/// A string of the heap. Equal strings have equal numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct StringId(pub(crate) u32);

/// A table of the heap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TableId(pub(crate) u32);

/// A value. Strings, tables and functions are numbers in the heap, which counts them in the order
/// in which they are made. So nothing that a script sees depends on addresses.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum Value {
    /// No value.
    #[default]
    Nil,
    /// True or false.
    Boolean(bool),
    /// A number.
    Number(f64),
    /// Bytes.
    String(StringId),
    /// A table.
    Table(TableId),
    /// A function of the script, or one with state of its own.
    Closure(u32),
    /// A function of the library.
    Native(u16),
    /// A function of the host.
    Host(u16),
    /// `cjson.null`.
    Null,
}

impl Value {
    /// Whether it counts as true.
    #[must_use]
    pub fn is_true(self) -> bool {
        !matches!(self, Self::Nil | Self::Boolean(false))
    }

    /// Whether it is no value.
    #[must_use]
    pub fn is_nil(self) -> bool {
        matches!(self, Self::Nil)
    }

    /// The name of its type.
    #[must_use]
    pub fn type_name(self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Boolean(_) => "boolean",
            Self::Number(_) => "number",
            Self::String(_) => "string",
            Self::Table(_) => "table",
            Self::Closure(_) | Self::Native(_) | Self::Host(_) => "function",
            Self::Null => "userdata",
        }
    }

    /// The table that it is.
    #[must_use]
    pub fn as_table(self) -> Option<TableId> {
        if let Self::Table(table) = self { Some(table) } else { None }
    }

    /// The string that it is.
    #[must_use]
    pub fn as_string(self) -> Option<StringId> {
        if let Self::String(string) = self { Some(string) } else { None }
    }

    /// Whether it is a function.
    #[must_use]
    pub fn is_function(self) -> bool {
        matches!(self, Self::Closure(_) | Self::Native(_) | Self::Host(_))
    }

    /// A hash that depends on the value only.
    pub(crate) fn hash(self) -> u64 {
        let (tag, bits) = match self {
            Self::Nil => (0, 0),
            Self::Boolean(is_true) => (1, u64::from(is_true)),
            // Both zeros are equal.
            Self::Number(number) => (2, if number == 0.0 { 0 } else { number.to_bits() }),
            Self::String(string) => (3, u64::from(string.0)),
            Self::Table(table) => (4, u64::from(table.0)),
            Self::Closure(closure) => (5, u64::from(closure)),
            Self::Native(native) => (6, u64::from(native)),
            Self::Host(host) => (7, u64::from(host)),
            Self::Null => (8, 0),
        };
        mix(bits ^ (tag << 60))
    }
}

/// Spreads the bits of a number.
pub(crate) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (number ^ (number >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (number >> 32)
}
