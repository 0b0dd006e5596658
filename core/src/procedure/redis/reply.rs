//! What a command answers.

use std::borrow::Cow;

use bytes::Bytes;

use super::number::Score;

/// The answer to a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// A status, such as `OK`.
    Status(&'static str),
    /// A status with another text.
    Line(String),
    /// An integer.
    Integer(i64),
    /// A string.
    Bulk(Bytes),
    /// No value.
    Nil,
    /// No list of values. RESP2 tells it from [`Reply::Nil`].
    NilArray,
    /// A score.
    Double(Score),
    /// A list.
    Array(Vec<Reply>),
    /// Names with values, one after the other; in RESP2 a list.
    Map(Vec<(Reply, Reply)>),
    /// Members with scores: a list of pairs; in RESP2 one list.
    Pairs(Vec<(Bytes, Score)>),
    /// Fields with values: a list of pairs; in RESP2 one list.
    Couples(Vec<(Bytes, Bytes)>),
    /// Different values; in RESP2 a list.
    Set(Vec<Reply>),
    /// An error. The command had no effect.
    Error(Failure),
}

impl Reply {
    /// The status of a command that did what it should.
    pub const OK: Self = Self::Status("OK");

    /// 1 or 0.
    #[must_use]
    pub fn flag(is_true: bool) -> Self {
        Self::Integer(i64::from(is_true))
    }

    /// A number of things.
    #[must_use]
    pub fn count(many: usize) -> Self {
        Self::Integer(i64::try_from(many).unwrap_or(i64::MAX))
    }

    /// A string, or no value.
    #[must_use]
    pub fn bulk_or_nil(text: Option<&Bytes>) -> Self {
        text.map_or(Self::Nil, |text| Self::Bulk(text.clone()))
    }

    /// A list of strings.
    #[must_use]
    pub fn bulks<'a>(texts: impl IntoIterator<Item = &'a Bytes>) -> Self {
        Self::Array(texts.into_iter().cloned().map(Self::Bulk).collect())
    }

    /// An upper bound of the bytes that it takes on the wire.
    #[must_use]
    pub fn bytes(&self) -> usize {
        const HEAD: usize = 32;
        match self {
            Self::Status(text) => text.len() + HEAD,
            Self::Line(text) => text.len() + HEAD,
            Self::Integer(_) | Self::Nil | Self::NilArray | Self::Double(_) => HEAD,
            Self::Bulk(text) => text.len() + HEAD,
            Self::Array(items) | Self::Set(items) => {
                HEAD + items.iter().map(Self::bytes).sum::<usize>()
            }
            Self::Map(items) => {
                let pair = |(name, value): &(Self, Self)| name.bytes() + value.bytes();
                HEAD + items.iter().map(pair).sum::<usize>()
            }
            Self::Pairs(items) => {
                HEAD + items.iter().map(|(name, _)| name.len() + 3 * HEAD).sum::<usize>()
            }
            Self::Couples(items) => {
                HEAD + items
                    .iter()
                    .map(|(one, two)| one.len() + two.len() + 3 * HEAD)
                    .sum::<usize>()
            }
            Self::Error(failure) => failure.0.len() + HEAD,
        }
    }
}

/// The text of an error, which begins with a word in capitals that clients compare.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(pub Cow<'static, str>);

impl Failure {
    /// The error with this text.
    #[must_use]
    pub const fn new(text: &'static str) -> Self {
        Self(Cow::Borrowed(text))
    }

    /// The error with a text that is not constant.
    #[must_use]
    pub fn of(text: String) -> Self {
        Self(Cow::Owned(text))
    }
}

/// The answer to a command, or why it had no effect.
pub type Answer = Result<Reply, Failure>;

/// The key holds a value of another type.
pub const WRONG_TYPE: Failure =
    Failure::new("WRONGTYPE Operation against a key holding the wrong kind of value");
/// The arguments cannot be understood.
pub const SYNTAX: Failure = Failure::new("ERR syntax error");
/// An argument or a value is no 64-bit integer.
pub const NOT_INTEGER: Failure = Failure::new("ERR value is not an integer or out of range");
/// An argument or a value is no number.
pub const NOT_FLOAT: Failure = Failure::new("ERR value is not a valid float");
/// An integer would leave its range.
pub const OVERFLOW: Failure = Failure::new("ERR increment or decrement would overflow");
/// The value would be too large.
pub const TOO_LARGE: Failure = Failure::new(
    "ERR the value of one key would exceed 1047552 bytes, counting 16 for each element; split it over several keys",
);
