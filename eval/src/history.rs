//! Histories: one line of JSON for each attempt at a transaction. `check` reads this format.
//!
//! [`Entry`] is one line. [`Reader`] and [`Writer`] stream lines. [`History`] is the compact form
//! for the checker: keys, transactions and versions are numbers, and a read of a list is the length
//! of a prefix, so that ten million transactions fit in memory.

mod compact;
pub(crate) mod dense;
mod intern;
mod lines;

use std::fmt;

use serde::de::{self, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::ser::{SerializeTuple as _, Serializer};
use serde::{Deserialize, Serialize};

pub use compact::{FormError, History};
pub(crate) use compact::{KeyId, ListRef, NEVER, NOBODY, OpRef, UNKNOWN};
pub use lines::{ReadError, Reader, Writer};

/// The outcome of an attempt, as its client saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Committed.
    Ok,
    /// Aborted: it must have no effect.
    Fail,
    /// Unknown: it may have committed at any time after it was invoked, or never.
    Info,
}

/// One attempt at a transaction.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The attempt's name: `c4.19`, `c4.19#2`.
    pub txn: String,
    /// The client. Its transactions follow each other.
    pub process: u64,
    /// The region of its client.
    pub region: String,
    /// `high` or `low`.
    pub priority: String,
    /// When the client submitted it, in microseconds since the run started.
    pub invoke_us: u64,
    /// When the client received the outcome; absent if it never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub complete_us: Option<u64>,
    /// The outcome that the client received.
    pub status: Status,
    /// True for a stale read: it asked for any consistent state, however old. Its reads are checked
    /// only against the order of the transactions that write, and not against the model's order of
    /// all transactions ([`crate::checker`]).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stale: bool,
    /// Its operations, reads first.
    pub ops: Vec<Op>,
}

/// One operation. In JSON an array: `["append","k",12]`, `["r","k",[3,12]]`, and for workloads
/// that keep versions `["r","k","c4.19@1700"]`, `["w","k","c4.20@1800"]` and, for a deletion,
/// `["d","k","c4.21@1900"]` (null: not known).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Appended an element to the list at the key. Of all attempts that append the same element to
    /// the same key, at most one may have a status other than `fail`: retries reuse elements.
    Append(String, u64),
    /// Read the list at the key.
    ReadList(String, Vec<u64>),
    /// Read the version of the key that `writer@timestamp` wrote; the initial one is `c0.0@0`. A
    /// database may forget that a key was deleted. Then the key has its initial version again.
    ReadVersion(String, String),
    /// Wrote a version of the key; none if the client never learnt the commit timestamp.
    WriteVersion(String, Option<String>),
    /// The same, and this version has no value: it deleted the key.
    DeleteVersion(String, Option<String>),
}

impl Op {
    /// The key it reads or writes.
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Append(key, _)
            | Self::ReadList(key, _)
            | Self::ReadVersion(key, _)
            | Self::WriteVersion(key, _)
            | Self::DeleteVersion(key, _) => key,
        }
    }
}

impl Serialize for Op {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(3)?;
        let verb = match self {
            Self::Append(..) => "append",
            Self::ReadList(..) | Self::ReadVersion(..) => "r",
            Self::WriteVersion(..) => "w",
            Self::DeleteVersion(..) => "d",
        };
        tuple.serialize_element(verb)?;
        tuple.serialize_element(self.key())?;
        match self {
            Self::Append(_, element) => tuple.serialize_element(element)?,
            Self::ReadList(_, list) => tuple.serialize_element(list)?,
            Self::ReadVersion(_, version) => tuple.serialize_element(version)?,
            Self::WriteVersion(_, version) | Self::DeleteVersion(_, version) => {
                tuple.serialize_element(version)?;
            }
        }
        tuple.end()
    }
}

/// By hand rather than through an untagged enum: that would buffer every operation, and its errors
/// say only that nothing matched.
impl<'de> Deserialize<'de> for Op {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(OpVisitor)
    }
}

struct OpVisitor;

impl<'de> Visitor<'de> for OpVisitor {
    type Value = Op;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an operation such as [\"append\",\"k\",12]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Op, A::Error> {
        let length = |found| de::Error::invalid_length(found, &"[verb,key,argument]");
        let verb: Verb = seq.next_element()?.ok_or_else(|| length(0))?;
        let key: String = seq.next_element()?.ok_or_else(|| length(1))?;
        let arg: Arg = seq.next_element()?.ok_or_else(|| length(2))?;
        if seq.next_element::<IgnoredAny>()?.is_some() {
            return Err(length(4));
        }
        match (verb, arg) {
            (Verb::Append, Arg::Element(element)) => Ok(Op::Append(key, element)),
            (Verb::Read, Arg::List(list)) => Ok(Op::ReadList(key, list)),
            (Verb::Read, Arg::Version(version)) => Ok(Op::ReadVersion(key, version)),
            (Verb::Write, Arg::Version(version)) => Ok(Op::WriteVersion(key, Some(version))),
            (Verb::Write, Arg::Null) => Ok(Op::WriteVersion(key, None)),
            (Verb::Delete, Arg::Version(version)) => Ok(Op::DeleteVersion(key, Some(version))),
            (Verb::Delete, Arg::Null) => Ok(Op::DeleteVersion(key, None)),
            (Verb::Append | Verb::Read | Verb::Write | Verb::Delete, _) => Err(de::Error::custom(
                format!("the argument of the operation on {key:?} does not fit its verb"),
            )),
        }
    }
}

enum Verb {
    Append,
    Read,
    Write,
    Delete,
}

impl<'de> Deserialize<'de> for Verb {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VerbVisitor;
        impl Visitor<'_> for VerbVisitor {
            type Value = Verb;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"append\", \"r\", \"w\" or \"d\"")
            }

            fn visit_str<E: de::Error>(self, verb: &str) -> Result<Verb, E> {
                match verb {
                    "append" => Ok(Verb::Append),
                    "r" => Ok(Verb::Read),
                    "w" => Ok(Verb::Write),
                    "d" => Ok(Verb::Delete),
                    _ => Err(E::invalid_value(de::Unexpected::Str(verb), &self)),
                }
            }
        }
        deserializer.deserialize_str(VerbVisitor)
    }
}

enum Arg {
    Element(u64),
    List(Vec<u64>),
    Version(String),
    Null,
}

impl<'de> Deserialize<'de> for Arg {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ArgVisitor;
        impl<'de> Visitor<'de> for ArgVisitor {
            type Value = Arg;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from 0, a list of them, \"writer@timestamp\" or null")
            }

            fn visit_u64<E: de::Error>(self, element: u64) -> Result<Arg, E> {
                Ok(Arg::Element(element))
            }

            fn visit_str<E: de::Error>(self, version: &str) -> Result<Arg, E> {
                Ok(Arg::Version(version.into()))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Arg, E> {
                Ok(Arg::Null)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Arg, A::Error> {
                let mut list = Vec::new();
                while let Some(element) = seq.next_element()? {
                    list.push(element);
                }
                Ok(Arg::List(list))
            }
        }
        deserializer.deserialize_any(ArgVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_form_round_trips() {
        for text in [
            r#"{"txn":"c4.19","process":4,"region":"VA","priority":"high","invoke_us":5,"complete_us":9,"status":"ok","ops":[["append","k7",12],["r","k7",[3,12]]]}"#,
            r#"{"txn":"c4.20","process":4,"region":"VA","priority":"low","invoke_us":5,"status":"info","ops":[["r","k","c0.0@0"],["w","k",null],["w","l","c4.20@9"],["d","m","c4.20@9"]]}"#,
        ] {
            let entry: Entry = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&entry).unwrap(), text);
        }
    }

    #[test]
    fn operations_of_another_form_are_refused_with_a_reason() {
        for (bad, reason) in [
            (r#"["jump","k",1]"#, "jump"),
            (r#"["append","k","x@1"]"#, "does not fit its verb"),
            (r#"["append","k",-1]"#, "-1"),
            (r#"["append","k",1.5]"#, "1.5"),
            (r#"["r","k",null]"#, "does not fit its verb"),
            (r#"["r","k",[1,-2]]"#, "-2"),
            (r#"["r","k"]"#, "length 2"),
            (r#"["r","k",[],[]]"#, "length 4"),
            (r#"{}"#, "an operation such as"),
        ] {
            let error = serde_json::from_str::<Op>(bad).unwrap_err().to_string();
            assert!(error.contains(reason), "{bad}: {error}");
        }
    }
}
