//! Converts between this library's types and the messages of the API.

use orthodrome_core::procedure::Call;
use orthodrome_core::txn::{Op, Priority, Read, Version};
use orthodrome_core::{ClientId, Key, Timestamp, TxnId};

use crate::Error;
use crate::outcome::{AbortReason, Aborted};
use crate::values::{Reads, Writes};

pub(crate) mod api {
    #![allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated")]
    tonic::include_proto!("orthodrome.v1");
}

/// The outcome of a transaction in one answer.
#[derive(Debug)]
pub(crate) enum Ended {
    Committed(Timestamp),
    Aborted(Aborted),
    /// With the reason why the gateway does not know.
    Unknown(String),
}

pub(crate) fn ended(outcome: Option<api::Outcome>) -> Ended {
    use api::outcome::Result;
    match outcome.and_then(|outcome| outcome.result) {
        Some(Result::Committed(committed)) => Ended::Committed(Timestamp(committed.timestamp)),
        Some(Result::Aborted(aborted)) => Ended::Aborted(Aborted {
            reason: reason(aborted.reason),
            retryable: aborted.retryable,
            because: None,
        }),
        Some(Result::Unknown(api::Unknown { is_forgotten: false })) => {
            Ended::Unknown("the gateway does not know the outcome yet".into())
        }
        Some(Result::Unknown(api::Unknown { is_forgotten: true })) => Ended::Unknown(
            "the cluster has forgotten the outcome: look at the keys, which may have changed"
                .into(),
        ),
        None => Ended::Unknown("the gateway's answer has no outcome".into()),
    }
}

/// Whether the answer says that no gateway will ever know the outcome.
pub(crate) fn is_forgotten(outcome: Option<&api::Outcome>) -> bool {
    use api::outcome::Result;
    let result = outcome.and_then(|outcome| outcome.result.as_ref());
    matches!(result, Some(Result::Unknown(api::Unknown { is_forgotten: true })))
}

fn reason(number: i32) -> AbortReason {
    use api::AbortReason as Wire;
    match Wire::try_from(number) {
        Ok(Wire::Conflict) => AbortReason::Conflict,
        Ok(Wire::StaleRead) => AbortReason::StaleRead,
        Ok(Wire::Client) => AbortReason::Client,
        Ok(Wire::Guard) => AbortReason::Guard,
        Ok(Wire::Recovery) => AbortReason::Recovery,
        Ok(Wire::Abandoned) => AbortReason::Abandoned,
        Ok(Wire::Overload) => AbortReason::Overload,
        Ok(Wire::Invalid) => AbortReason::Invalid,
        Ok(Wire::TooLarge) => AbortReason::TooLarge,
        Ok(Wire::Unspecified) | Err(_) => AbortReason::Other(number),
    }
}

pub(crate) fn txn_id(id: TxnId) -> Option<api::TxnId> {
    Some(api::TxnId { client: id.client.0, counter: id.counter, attempt: id.attempt })
}

pub(crate) fn priority(priority: Priority) -> Result<i32, Error> {
    match priority {
        Priority::LOW => Ok(api::Priority::Low.into()),
        Priority::HIGH => Ok(api::Priority::High.into()),
        Priority(level) => Err(Error::Invalid(format!("priority {level} is neither low nor high"))),
    }
}

pub(crate) fn keys(keys: impl IntoIterator<Item = Key>) -> Vec<bytes::Bytes> {
    keys.into_iter().map(|key| key.to_bytes()).collect()
}

/// The key of a read, and what it held.
pub(crate) fn read(read: api::KeyRead) -> (Key, Read) {
    let version = read.version.unwrap_or_default();
    let writer = version.writer.unwrap_or_default();
    let name = TxnId::new(ClientId(writer.client), writer.counter);
    let writer = TxnId { attempt: writer.attempt, ..name };
    let version = Version { timestamp: Timestamp(version.timestamp), writer };
    let value = read.value.map(orthodrome_core::Value);
    (Key::from(read.key), Read { value, version })
}

pub(crate) fn reads(reads: Vec<api::KeyRead>) -> Reads {
    Reads(reads.into_iter().map(read).collect())
}

pub(crate) fn versions(reads: &Reads) -> Vec<api::KeyVersion> {
    let version = |(key, read): (&Key, &Read)| {
        let Version { timestamp, writer } = read.compared();
        let version = api::Version { timestamp: timestamp.0, writer: txn_id(writer) };
        api::KeyVersion { key: key.to_bytes(), version: Some(version) }
    };
    reads.0.iter().map(version).collect()
}

pub(crate) fn writes(writes: Writes) -> Vec<api::KeyWrite> {
    let write = |(key, value): (Key, Option<orthodrome_core::Value>)| api::KeyWrite {
        key: key.to_bytes(),
        value: value.map(|value| value.0),
    };
    writes.0.into_iter().map(write).collect()
}

/// The writes of a transaction if it committed, as far as the resolve request contains them. Of a
/// procedure it contains only the keys written, which count like deletions.
pub(crate) fn asked_writes(question: &api::ResolveRequest) -> Writes {
    use api::resolve_request::{Begun, Decision};
    let mut writes = Writes::new();
    if let Some(Decision::Commit(commit)) = &question.decision {
        let write = |write: &api::KeyWrite| {
            (Key::from(&write.key), write.value.clone().map(orthodrome_core::Value))
        };
        writes.0.extend(commit.writes.iter().map(write));
    }
    if let Some(Begun::Procedure(procedure)) = &question.begun {
        for api::Op { key, op } in &procedure.ops {
            match op {
                Some(api::op::Op::Call(call)) => {
                    writes.0.extend(call.writes.iter().map(|key| (Key::from(key), None)));
                }
                Some(api::op::Op::Get(_) | api::op::Op::Compare(_)) | None => {}
                Some(_) => drop(writes.0.insert(Key::from(key), None)),
            }
        }
    }
    writes
}

/// True if the question is about a transaction that its client has not asked to commit.
pub(crate) fn is_undecided(question: &api::ResolveRequest) -> bool {
    use api::resolve_request::Begun;
    matches!(question.begun, Some(Begun::Interactive(_))) && question.decision.is_none()
}

pub(crate) fn op(op: Op) -> api::Op {
    use api::op::Op as Wire;
    let (key, op) = match op {
        Op::Get(key) => (key, Wire::Get(api::Get {})),
        Op::Compare(key, expected) => {
            (key, Wire::Compare(api::Compare { expected: expected.map(|value| value.0) }))
        }
        Op::Put(key, value) => (key, Wire::Put(value.0)),
        Op::Add(key, amount) => (key, Wire::Add(amount)),
        Op::Append(key, value) => (key, Wire::Append(value.0)),
        Op::Delete(key) => (key, Wire::Delete(api::Delete {})),
        Op::Call(Call { procedure, reads, writes, arguments }) => {
            let bytes = |keys: Vec<Key>| keys.into_iter().map(|key| key.to_bytes()).collect();
            let call = api::Call {
                procedure: procedure.name().into(),
                reads: bytes(reads),
                writes: bytes(writes),
                arguments: arguments.0,
            };
            (Key::default(), Wire::Call(call))
        }
    };
    api::Op { key: key.to_bytes(), op: Some(op) }
}
