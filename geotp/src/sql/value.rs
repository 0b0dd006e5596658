//! Values: bound parameters, sharding keys, and types of columns.

use std::fmt;

/// A bound parameter or a constant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    /// NULL.
    Null,
    /// A boolean.
    Bool(bool),
    /// A number in SQL's syntax: digits, sign, point, exponent.
    Number(String),
    /// Text, and types without a variant here (dates, JSON).
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
}

/// A sharding key. Numbers are ordered as numbers, texts byte by byte.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Key {
    /// A whole number.
    Int(i128),
    /// Text.
    Text(String),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Text(value) => f.write_str(value),
        }
    }
}

impl Key {
    /// The hash of the key. The function must never change, because rows were placed by it.
    #[must_use]
    pub fn hash(&self) -> u64 {
        // FNV-1a over the bytes, finished by the mixer of SplitMix64 so that its low bits are good.
        let bytes = match self {
            Self::Int(value) => value.to_le_bytes().to_vec(),
            Self::Text(value) => value.as_bytes().to_vec(),
        };
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    }
}

/// The type of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Boolean: `t` and `f`.
    Bool,
    /// 16 bits, signed.
    Int2,
    /// 32 bits, signed.
    Int4,
    /// 64 bits, signed.
    Int8,
    /// Exact decimal.
    Decimal,
    /// Single precision.
    Float4,
    /// Double precision.
    Float8,
    /// Characters.
    Text,
    /// Bytes.
    Bytes,
    /// A date.
    Date,
    /// A time of day.
    Time,
    /// Date and time.
    Timestamp,
    /// Date and time with a zone.
    TimestampTz,
    /// JSON.
    Json,
    /// A UUID.
    Uuid,
    /// Any other type, in its source's text form.
    Other,
}

impl Kind {
    /// Exact numbers.
    #[must_use]
    pub fn is_exact(self) -> bool {
        matches!(self, Self::Int2 | Self::Int4 | Self::Int8 | Self::Decimal)
    }

    /// Numbers with rounding.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::Float4 | Self::Float8)
    }
}

/// A column of a result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// Its type.
    pub kind: Kind,
    /// PostgreSQL's number of its type; 0 if the answer is of another kind of source.
    pub oid: u32,
}

/// One field of a row: NULL, or the text form of its kind (for [`Kind::Bytes`], the bytes).
pub type Cell = Option<Vec<u8>>;

/// A source's answer to one statement.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Answer {
    /// Columns; none if the statement returns no rows.
    pub columns: Vec<Column>,
    /// Rows.
    pub rows: Vec<Vec<Cell>>,
    /// Number of rows changed or returned.
    pub affected: u64,
    /// MariaDB's last generated key; 0 if there is none.
    pub last_insert_id: u64,
    /// How many of the affected rows a MariaDB source found and left as they were.
    pub unchanged: u64,
}
