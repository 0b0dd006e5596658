//! Turns attempts at transactions, as a client sees them, into lines of a history.

use orthodrome_core::id::TxnId;
use orthodrome_core::time::Time;
use orthodrome_core::txn::{Decision, Key, Kind, Op as TxnOp, Outcome, Reads, Version};

use crate::history::{Entry, Op, Status};
use crate::workload::{Request, Values, list_elements};

/// One attempt at a request, as its client saw it.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    /// The request.
    pub request: &'a Request,
    /// The attempt's name.
    pub txn: TxnId,
    /// Name of the client's region.
    pub region: &'a str,
    /// When the client submitted it.
    pub invoked: Time,
    /// When the client received the outcome, and the outcome; none if it never did.
    pub completed: Option<(Time, Outcome)>,
    /// The values read, if the client received them.
    pub reads: Option<&'a Reads>,
    /// The decision of the client of an interactive transaction, if it made one.
    pub decision: Option<&'a Decision>,
    /// It aborted, and the client makes another attempt at the same request.
    pub is_retried: bool,
}

/// An attempt that contradicts itself or the workload: the protocol broke its contract.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RecordError {
    /// It committed, but a key that it declared was not among its reads.
    #[error("{txn} committed, but its reads lack {key}")]
    Unread {
        /// The attempt.
        txn: TxnId,
        /// The key.
        key: Key,
    },
    /// An interactive transaction committed although its client had not asked for it.
    #[error("{0} is interactive and committed, but its client did not decide to commit")]
    Undecided(TxnId),
    /// A value that no sequence of appends can have produced.
    #[error("{txn} read {length} bytes at {key}; a list has a multiple of 8")]
    NoList {
        /// The attempt.
        txn: TxnId,
        /// The key.
        key: Key,
        /// How long the value is.
        length: usize,
    },
}

/// The line of a history that describes `attempt`.
///
/// A list element belongs to a request, not to an attempt, and must be unique in a history. So only
/// the last attempt of a request lists its appends. The checker still sees an aborted attempt that
/// had an effect: the element is then in the list twice.
///
/// # Errors
/// If the protocol broke its contract. Such an error is as serious as an anomaly.
pub fn entry(attempt: &Attempt<'_>, values: Values) -> Result<Entry, RecordError> {
    let &Attempt { request, txn, region, invoked, completed, .. } = attempt;
    let status = match completed {
        Some((_, Outcome::Committed(_))) => Status::Ok,
        Some((_, Outcome::Aborted(_))) => Status::Fail,
        Some((_, Outcome::Unknown)) | None => Status::Info,
    };
    let mut ops = read_ops(attempt, values, status)?;
    ops.extend(write_ops(attempt, values, status)?);
    Ok(Entry {
        txn: txn.to_string(),
        process: txn.client.0,
        region: region.into(),
        priority: request.priority.to_string(),
        invoke_us: invoked.as_micros(),
        complete_us: completed.map(|(at, _)| at.as_micros()),
        status,
        stale: request.kind == Kind::StaleReadOnly,
        ops,
    })
}

fn read_ops(attempt: &Attempt<'_>, values: Values, status: Status) -> Result<Vec<Op>, RecordError> {
    let txn = attempt.txn;
    let mut ops = Vec::new();
    // A general transaction reads more than it declared.
    let more = attempt.reads.into_iter().flat_map(|reads| reads.keys());
    let more = more.filter(|key| !attempt.request.reads.contains(key));
    for key in attempt.request.reads.iter().chain(more) {
        let Some(read) = attempt.reads.and_then(|reads| reads.get(key)) else {
            if status == Status::Ok {
                return Err(RecordError::Unread { txn, key: key.clone() });
            }
            continue;
        };
        ops.push(match values {
            Values::Lists => {
                let list = list_elements(read.value.as_ref()).ok_or_else(|| {
                    let length = read.value.as_ref().map_or(0, |value| value.len());
                    RecordError::NoList { txn, key: key.clone(), length }
                })?;
                Op::ReadList(key.to_string(), list)
            }
            Values::Versions => {
                let unwritten = read.version.is_unwritten();
                let version = if unwritten { Version::INITIAL } else { read.version };
                Op::ReadVersion(key.to_string(), version.to_string())
            }
        });
    }
    Ok(ops)
}

fn write_ops(
    attempt: &Attempt<'_>,
    values: Values,
    status: Status,
) -> Result<Vec<Op>, RecordError> {
    let is_committed = status == Status::Ok;
    let keys: Vec<(&Key, bool)> = match (&attempt.request.kind, attempt.decision) {
        (Kind::Interactive | Kind::General, Some(Decision::Commit(writes))) => {
            writes.iter().map(|(key, value)| (key, value.is_none())).collect()
        }
        (Kind::Interactive | Kind::General, Some(Decision::Abort) | None) if is_committed => {
            return Err(RecordError::Undecided(attempt.txn));
        }
        // A client that never asked to commit cannot have written anything.
        (Kind::Interactive | Kind::General, Some(Decision::Abort) | None) => Vec::new(),
        // A procedure whose guards hold writes every key that it declared.
        (Kind::Procedure(ops), _) => {
            attempt.request.writes.iter().map(|key| (key, deletes(ops, key))).collect()
        }
        (Kind::ReadOnly | Kind::StaleReadOnly, _) => Vec::new(),
    };
    let version = match attempt.completed {
        Some((_, Outcome::Committed(timestamp))) => {
            Some(Version { timestamp, writer: attempt.txn }.to_string())
        }
        Some((_, Outcome::Aborted(_) | Outcome::Unknown)) | None => None,
    };
    let is_superseded = attempt.is_retried && status == Status::Fail;
    Ok(keys
        .into_iter()
        .filter_map(|(key, deletes)| match values {
            Values::Lists if is_superseded => None,
            Values::Lists => Some(Op::Append(key.to_string(), attempt.request.parameter)),
            Values::Versions if deletes => {
                Some(Op::DeleteVersion(key.to_string(), version.clone()))
            }
            Values::Versions => Some(Op::WriteVersion(key.to_string(), version.clone())),
        })
        .collect())
}

/// True if the last of these operations on `key` deletes it. The results of a stored procedure are
/// not known here; no workload has one that deletes.
#[must_use]
pub fn deletes(ops: &[TxnOp], key: &Key) -> bool {
    let last = ops.iter().rfind(|op| op.writes().contains(key));
    matches!(last, Some(TxnOp::Delete(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::id::ClientId;
    use orthodrome_core::time::Timestamp;
    use orthodrome_core::txn::{AbortReason, Priority, Read, Value, Writes};

    fn request(kind: Kind, reads: &[&str], writes: &[&str]) -> Request {
        let keys = |names: &[&str]| names.iter().map(|name| Key::from(*name)).collect();
        Request {
            name: "test",
            kind,
            reads: keys(reads),
            writes: keys(writes),
            priority: Priority::HIGH,
            parameter: 12,
            scan: None,
        }
    }

    fn list(key: &str, elements: &[u64], version: Version) -> (Key, Read) {
        let bytes: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        (key.into(), Read { value: Some(Value::from(bytes)), version })
    }

    fn attempt<'a>(request: &'a Request, reads: &'a Reads) -> Attempt<'a> {
        Attempt {
            request,
            txn: TxnId { attempt: 2, ..TxnId::new(ClientId(4), 19) },
            region: "VA",
            invoked: Time(5_000),
            completed: Some((Time(9_999), Outcome::Committed(Timestamp(1_700)))),
            reads: Some(reads),
            decision: None,
            is_retried: false,
        }
    }

    fn json(attempt: &Attempt<'_>, values: Values) -> String {
        serde_json::to_string(&entry(attempt, values).unwrap()).unwrap()
    }

    #[test]
    fn lists_and_versions_take_the_published_form() {
        let request = request(Kind::Interactive, &["k7", "k8"], &["k7"]);
        let writer = TxnId::new(ClientId(3), 1);
        let version = Version { timestamp: Timestamp(900), writer };
        let mut reads = Reads::from([list("k7", &[3, 12], version)]);
        reads.insert("k8".into(), Read::default());
        let decision = Decision::Commit(Writes::from([("k7".into(), None)]));
        let attempt = Attempt { decision: Some(&decision), ..attempt(&request, &reads) };
        let head = r#"{"txn":"c4.19#2","process":4,"region":"VA","priority":"high","invoke_us":5,"complete_us":9,"status":"ok","ops":"#;
        assert_eq!(
            json(&attempt, Values::Lists),
            format!(r#"{head}[["r","k7",[3,12]],["r","k8",[]],["append","k7",12]]}}"#)
        );
        assert_eq!(
            json(&attempt, Values::Versions),
            format!(
                r#"{head}[["r","k7","c3.1@900"],["r","k8","c0.0@0"],["d","k7","c4.19#2@1700"]]}}"#
            )
        );
    }

    #[test]
    fn possible_commit_timestamps_are_listed_and_impossible_ones_are_not() {
        let none = Reads::new();
        let interactive = request(Kind::Interactive, &["k"], &["k"]);
        let procedure = request(Kind::Procedure(Vec::new()), &["k"], &["k"]);
        let commit = Decision::Commit(Writes::from([("k".into(), None)]));
        let aborted = Some((Time(7_000), Outcome::Aborted(AbortReason::Conflict)));
        let unknown = Some((Time(7_000), Outcome::Unknown));
        for (request, decision, completed, is_retried, expected) in [
            (&interactive, None, None, false, r#""status":"info","ops":[]}"#),
            (&interactive, Some(&commit), None, false, r#""info","ops":[["append","k",12]]}"#),
            (&interactive, Some(&Decision::Abort), aborted, false, r#""fail","ops":[]}"#),
            (&interactive, Some(&commit), aborted, false, r#""fail","ops":[["append","k",12]]}"#),
            (&interactive, Some(&commit), aborted, true, r#""fail","ops":[]}"#),
            (&procedure, None, unknown, true, r#""info","ops":[["append","k",12]]}"#),
        ] {
            let base = attempt(request, &none);
            let attempt = Attempt { reads: None, decision, completed, is_retried, ..base };
            let text = json(&attempt, Values::Lists);
            assert!(text.ends_with(expected), "{text} does not end with {expected}");
            assert_eq!(text.contains("complete_us"), completed.is_some());
        }
        let attempt = Attempt { reads: None, completed: unknown, ..attempt(&procedure, &none) };
        assert!(json(&attempt, Values::Versions).ends_with(r#"[["w","k",null]]}"#));
    }

    #[test]
    fn broken_contracts_are_findings() {
        let none = Reads::new();
        let interactive = request(Kind::Interactive, &["k"], &["k"]);
        let all = Reads::from([list("k", &[], Version::INITIAL)]);
        let unread = entry(&attempt(&interactive, &none), Values::Versions).unwrap_err();
        assert_eq!(unread.to_string(), "c4.19#2 committed, but its reads lack k");
        let undecided = entry(&attempt(&interactive, &all), Values::Versions).unwrap_err();
        assert!(undecided.to_string().contains("did not decide"), "{undecided}");
        let text = Read { value: Some("text".into()), ..Read::default() };
        let bad = Reads::from([(Key::from("k"), text)]);
        let no_list = entry(&attempt(&interactive, &bad), Values::Lists).unwrap_err();
        assert!(no_list.to_string().contains("4 bytes at k"), "{no_list}");
    }
}
