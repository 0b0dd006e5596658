//! Histories: one line of JSON for each attempt at a transaction, in the form that `check` reads.

use serde::{Deserialize, Serialize};

/// What became of an attempt, as its caller saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Committed.
    Ok,
    /// Aborted: it must have had no effect.
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
    /// The client; its transactions follow each other.
    pub process: u64,
    /// The region it was begun in.
    pub region: String,
    /// `high` or `low`.
    pub priority: String,
    /// When the caller began it, in microseconds since the run started.
    pub invoke_us: u64,
    /// When the caller was told; absent if it never was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub complete_us: Option<u64>,
    /// What the caller was told.
    pub status: Status,
    /// What it did, reads first.
    pub ops: Vec<Op>,
}

/// One operation. In JSON an array: `["append","k",12]`, `["r","k",[3,12]]`, and for workloads
/// that keep versions `["r","k","c4.19@1700"]` and `["w","k","c4.20@1800"]` (null: not known).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(into = "RawOp", try_from = "RawOp")]
pub enum Op {
    /// Appended an element, unique in the key's whole history, to the list at the key.
    Append(String, u64),
    /// Read the list at the key.
    ReadList(String, Vec<u64>),
    /// Read the version of the key that `writer@timestamp` wrote; the initial one is `c0.0@0`.
    ReadVersion(String, String),
    /// Wrote a version of the key; none if the caller never learnt the commit timestamp.
    WriteVersion(String, Option<String>),
}

#[derive(Clone, Serialize, Deserialize)]
struct RawOp(String, String, RawArg);

#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum RawArg {
    Element(u64),
    List(Vec<u64>),
    Version(Option<String>),
}

impl From<Op> for RawOp {
    fn from(op: Op) -> Self {
        match op {
            Op::Append(key, element) => Self("append".into(), key, RawArg::Element(element)),
            Op::ReadList(key, list) => Self("r".into(), key, RawArg::List(list)),
            Op::ReadVersion(key, version) => Self("r".into(), key, RawArg::Version(Some(version))),
            Op::WriteVersion(key, version) => Self("w".into(), key, RawArg::Version(version)),
        }
    }
}

impl TryFrom<RawOp> for Op {
    type Error = String;

    fn try_from(RawOp(verb, key, arg): RawOp) -> Result<Self, String> {
        match (verb.as_str(), arg) {
            ("append", RawArg::Element(element)) => Ok(Self::Append(key, element)),
            ("r", RawArg::List(list)) => Ok(Self::ReadList(key, list)),
            ("r", RawArg::Version(Some(version))) => Ok(Self::ReadVersion(key, version)),
            ("w", RawArg::Version(version)) => Ok(Self::WriteVersion(key, version)),
            _ => Err(format!(
                "[{verb:?},{key:?},…] is no operation; use [\"append\",key,number], \
                 [\"r\",key,[numbers]], [\"r\",key,\"writer@timestamp\"] or \
                 [\"w\",key,\"writer@timestamp\"]"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_form_round_trips() {
        for text in [
            r#"{"txn":"c4.19","process":4,"region":"VA","priority":"high","invoke_us":5,"complete_us":9,"status":"ok","ops":[["append","k7",12],["r","k7",[3,12]]]}"#,
            r#"{"txn":"c4.20","process":4,"region":"VA","priority":"low","invoke_us":5,"status":"info","ops":[["r","k","c0.0@0"],["w","k",null]]}"#,
        ] {
            let entry: Entry = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&entry).unwrap(), text);
        }
        let bad = r#"["jump","k",1]"#;
        assert!(serde_json::from_str::<Op>(bad).unwrap_err().to_string().contains("jump"));
    }
}
