//! The encoding of the decision log's records, and of messages between middlewares and agents.
//! Fields are numbered, so that other versions can add fields.

use bytes::Bytes;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{NodeId, Time, Timestamp};
use orthodrome_geotp::contract::{
    Failure, Fence, FromAgent, Isolation, Mark, PeerRollback, Reason, Record, Then, ToAgent, Wait,
    Xid,
};
use orthodrome_geotp::sql::plan::Keys;
use orthodrome_geotp::sql::{Answer, Column, Kind, Record as Row};
use prost::Message as _;

use super::driver::{Fault, Setting, Sql, Statement};

#[derive(Clone, PartialEq, prost::Message)]
struct XidMessage {
    #[prost(uint32, tag = "1")]
    middleware: u32,
    #[prost(uint64, tag = "2")]
    epoch: u64,
    #[prost(uint64, tag = "3")]
    number: u64,
}

impl From<Xid> for XidMessage {
    fn from(xid: Xid) -> Self {
        Self { middleware: xid.middleware.0, epoch: xid.epoch, number: xid.number }
    }
}

impl From<XidMessage> for Xid {
    fn from(xid: XidMessage) -> Self {
        Self { middleware: NodeId(xid.middleware), epoch: xid.epoch, number: xid.number }
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct BranchMessage {
    #[prost(uint32, tag = "1")]
    source: u32,
    #[prost(bool, tag = "2")]
    wrote: bool,
}

/// An epoch, a decision, or an end.
#[derive(Clone, PartialEq, prost::Message)]
struct RecordMessage {
    #[prost(uint32, tag = "1")]
    what: u32,
    #[prost(uint64, tag = "2")]
    epoch: u64,
    #[prost(message, optional, tag = "3")]
    xid: Option<XidMessage>,
    #[prost(uint64, tag = "4")]
    at: u64,
    #[prost(message, repeated, tag = "5")]
    branches: Vec<BranchMessage>,
}

const EPOCH: u32 = 1;
const COMMIT: u32 = 2;
const ENDED: u32 = 3;

/// Encodes a record. Clients' ids of transactions exist only in the simulator and are not stored.
pub(crate) fn encode_record(record: &Record) -> Bytes {
    let empty = RecordMessage::default();
    let message = match record {
        Record::Epoch(epoch) => RecordMessage { what: EPOCH, epoch: *epoch, ..empty },
        Record::Commit { xid, label: _, at, branches } => RecordMessage {
            what: COMMIT,
            xid: Some((*xid).into()),
            at: at.0,
            branches: branches
                .iter()
                .map(|(source, wrote)| BranchMessage { source: source.0, wrote: *wrote })
                .collect(),
            ..empty
        },
        Record::Ended(xid) => RecordMessage { what: ENDED, xid: Some((*xid).into()), ..empty },
    };
    message.encode_to_vec().into()
}

/// Decodes what [`encode_record`] wrote.
pub(crate) fn decode_record(bytes: &Bytes) -> Option<Record> {
    let message = RecordMessage::decode(bytes.clone()).ok()?;
    let xid = message.xid.map(Xid::from);
    match message.what {
        EPOCH => Some(Record::Epoch(message.epoch)),
        COMMIT => {
            let branches: OrdMap<NodeId, bool> =
                message.branches.iter().map(|b| (NodeId(b.source), b.wrote)).collect();
            Some(Record::Commit { xid: xid?, label: None, at: Timestamp(message.at), branches })
        }
        ENDED => Some(Record::Ended(xid?)),
        _ => None,
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct StatementMessage {
    #[prost(string, tag = "1")]
    text: String,
    #[prost(string, repeated, tag = "2")]
    prelude: Vec<String>,
    #[prost(message, repeated, tag = "3")]
    sought: Vec<NamedMessage>,
    #[prost(bool, tag = "4")]
    is_delete: bool,
    #[prost(message, repeated, tag = "5")]
    inserted: Vec<NamedMessage>,
    #[prost(string, repeated, tag = "6")]
    filled: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    settings: Vec<SettingMessage>,
    #[prost(bool, tag = "8")]
    may_leave: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SettingMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    value: String,
}

impl From<&Statement> for StatementMessage {
    fn from(statement: &Statement) -> Self {
        let Statement { prelude, text, keys, settings, may_leave } = statement.clone();
        let all = |records: Vec<Row>| records.into_iter().map(NamedMessage::from).collect();
        let setting = |Setting { name, value }| SettingMessage { name, value };
        Self {
            text,
            prelude,
            sought: all(keys.sought),
            is_delete: keys.is_delete,
            inserted: all(keys.inserted),
            filled: keys.filled,
            settings: settings.into_iter().map(setting).collect(),
            may_leave,
        }
    }
}

impl From<StatementMessage> for Statement {
    fn from(m: StatementMessage) -> Self {
        let all = |records: Vec<NamedMessage>| records.into_iter().map(Row::from).collect();
        let keys = Keys {
            sought: all(m.sought),
            is_delete: m.is_delete,
            inserted: all(m.inserted),
            filled: m.filled,
        };
        let setting = |SettingMessage { name, value }| Setting { name, value };
        let settings = m.settings.into_iter().map(setting).collect();
        Self { prelude: m.prelude, text: m.text, keys, settings, may_leave: m.may_leave }
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct NamedMessage {
    #[prost(string, tag = "1")]
    table: String,
    #[prost(string, tag = "2")]
    key: String,
    #[prost(string, tag = "3")]
    condition: String,
}

impl From<Row> for NamedMessage {
    fn from(Row { table, key, condition }: Row) -> Self {
        Self { table, key, condition }
    }
}

impl From<NamedMessage> for Row {
    fn from(NamedMessage { table, key, condition }: NamedMessage) -> Self {
        Self { table, key, condition }
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct CellMessage {
    #[prost(bytes = "vec", optional, tag = "1")]
    value: Option<Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RowMessage {
    #[prost(message, repeated, tag = "1")]
    cells: Vec<CellMessage>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ColumnMessage {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint32, tag = "2")]
    kind: u32,
    #[prost(uint32, tag = "3")]
    oid: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AnswerMessage {
    #[prost(message, repeated, tag = "1")]
    columns: Vec<ColumnMessage>,
    #[prost(message, repeated, tag = "2")]
    rows: Vec<RowMessage>,
    #[prost(uint64, tag = "3")]
    affected: u64,
    #[prost(uint64, tag = "4")]
    last_insert_id: u64,
    #[prost(uint64, tag = "5")]
    unchanged: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct FailureMessage {
    #[prost(uint32, tag = "1")]
    reason: u32,
    #[prost(string, optional, tag = "2")]
    sqlstate: Option<String>,
    #[prost(uint32, tag = "3")]
    number: u32,
    #[prost(string, tag = "4")]
    text: String,
}

/// All messages in both directions; `what` says which fields are used.
#[derive(Clone, PartialEq, prost::Message)]
struct LinkMessage {
    #[prost(uint32, tag = "1")]
    what: u32,
    #[prost(message, optional, tag = "2")]
    xid: Option<XidMessage>,
    #[prost(uint64, tag = "3")]
    epoch: u64,
    #[prost(uint64, tag = "4")]
    time: u64,
    #[prost(uint64, tag = "5")]
    oldest: u64,
    #[prost(uint32, tag = "6")]
    round: u32,
    #[prost(uint64, tag = "7")]
    life: u64,
    #[prost(uint32, repeated, tag = "8")]
    peers: Vec<u32>,
    #[prost(uint32, tag = "9")]
    isolation: u32,
    #[prost(message, repeated, tag = "10")]
    statements: Vec<StatementMessage>,
    #[prost(bool, tag = "11")]
    flag: bool,
    #[prost(uint32, tag = "12")]
    then: u32,
    #[prost(uint64, tag = "13")]
    source_life: u64,
    #[prost(message, repeated, tag = "14")]
    answers: Vec<AnswerMessage>,
    #[prost(message, optional, tag = "15")]
    failure: Option<FailureMessage>,
    #[prost(message, repeated, tag = "16")]
    prepared: Vec<XidMessage>,
    #[prost(message, repeated, tag = "17")]
    earlier: Vec<XidMessage>,
    #[prost(message, repeated, tag = "18")]
    marks: Vec<MarkMessage>,
}

/// An action on a savepoint.
#[derive(Clone, PartialEq, prost::Message)]
struct MarkMessage {
    #[prost(uint32, tag = "1")]
    what: u32,
    #[prost(uint32, tag = "2")]
    number: u32,
}

const BACK: u32 = 1;
const RELEASE: u32 = 2;
const SET: u32 = 3;

impl From<&Mark> for MarkMessage {
    fn from(mark: &Mark) -> Self {
        let (what, number) = match *mark {
            Mark::Back(number) => (BACK, number),
            Mark::Release(number) => (RELEASE, number),
            Mark::Set(number) => (SET, number),
        };
        Self { what, number }
    }
}

fn mark(MarkMessage { what, number }: MarkMessage) -> Option<Mark> {
    match what {
        BACK => Some(Mark::Back(number)),
        RELEASE => Some(Mark::Release(number)),
        SET => Some(Mark::Set(number)),
        _ => None,
    }
}

/// A message between processes.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Link {
    /// From a middleware.
    Order(ToAgent<Sql>),
    /// From an agent.
    Word(FromAgent<Sql>),
    /// Between agents.
    Peer(PeerRollback),
    /// The greeting: the sender and the secret.
    Hello {
        /// The middleware's number, or 0 for an agent.
        node: NodeId,
        /// The shared secret.
        secret: String,
    },
}

const KINDS: [Kind; 16] = [
    Kind::Bool,
    Kind::Int2,
    Kind::Int4,
    Kind::Int8,
    Kind::Decimal,
    Kind::Float4,
    Kind::Float8,
    Kind::Text,
    Kind::Bytes,
    Kind::Date,
    Kind::Time,
    Kind::Timestamp,
    Kind::TimestampTz,
    Kind::Json,
    Kind::Uuid,
    Kind::Other,
];
const REASONS: [Reason; 15] = [
    Reason::Deadlock,
    Reason::LockTimeout,
    Reason::Serialization,
    Reason::Statement,
    Reason::Connection,
    Reason::Unprepared,
    Reason::Restarted,
    Reason::Peer,
    Reason::Master,
    Reason::Ended,
    Reason::Unknown,
    Reason::Timeout,
    Reason::Refused,
    Reason::Session,
    Reason::Marked,
];
const ISOLATIONS: [Isolation; 4] = [
    Isolation::Serializable,
    Isolation::RepeatableRead,
    Isolation::ReadCommitted,
    Isolation::Keyed,
];
const THENS: [Then; 3] = [Then::Wait, Then::Prepare, Then::Commit];

fn place<T: PartialEq>(of: &T, all: &[T]) -> u32 {
    // Values start at 1, because 0 stands for a missing field.
    all.iter().position(|one| one == of).map_or(0, |place| place as u32 + 1)
}

fn at<T: Copy>(place: u32, all: &[T]) -> Option<T> {
    all.get((place as usize).checked_sub(1)?).copied()
}

fn failure_message(failure: &Failure<Sql>) -> FailureMessage {
    let fault = failure.fault.as_ref();
    FailureMessage {
        reason: place(&failure.reason, &REASONS),
        sqlstate: fault.map(|fault| fault.sqlstate.clone()),
        number: fault.map_or(0, |fault| u32::from(fault.number)),
        text: fault.map_or_else(String::new, |fault| fault.message.clone()),
    }
}

fn failure(message: FailureMessage) -> Option<Failure<Sql>> {
    let FailureMessage { reason, sqlstate, number, text } = message;
    let fault = sqlstate.map(|sqlstate| Fault { sqlstate, number: number as u16, message: text });
    Some(Failure { reason: at(reason, &REASONS)?, fault })
}

fn answer_message(answer: &Answer) -> AnswerMessage {
    let column = |c: &Column| ColumnMessage {
        name: c.name.clone(),
        kind: place(&c.kind, &KINDS),
        oid: c.oid,
    };
    let row = |row: &Vec<Option<Vec<u8>>>| RowMessage {
        cells: row.iter().map(|cell| CellMessage { value: cell.clone() }).collect(),
    };
    AnswerMessage {
        columns: answer.columns.iter().map(column).collect(),
        rows: answer.rows.iter().map(row).collect(),
        affected: answer.affected,
        last_insert_id: answer.last_insert_id,
        unchanged: answer.unchanged,
    }
}

fn answer(message: AnswerMessage) -> Option<Answer> {
    let column =
        |c: ColumnMessage| Some(Column { name: c.name, kind: at(c.kind, &KINDS)?, oid: c.oid });
    Some(Answer {
        columns: message.columns.into_iter().map(column).collect::<Option<_>>()?,
        rows: message
            .rows
            .into_iter()
            .map(|row| row.cells.into_iter().map(|cell| cell.value).collect())
            .collect(),
        affected: message.affected,
        last_insert_id: message.last_insert_id,
        unchanged: message.unchanged,
    })
}

/// Encodes a message.
pub(crate) fn encode(link: &Link) -> Vec<u8> {
    message(link).encode_to_vec()
}

fn message(link: &Link) -> LinkMessage {
    let empty = LinkMessage::default();
    let of = |what: u32, xid: &Xid| LinkMessage {
        what,
        xid: Some((*xid).into()),
        ..LinkMessage::default()
    };
    let numbers = |peers: &[NodeId]| peers.iter().map(|peer| peer.0).collect();
    match link {
        Link::Hello { node, secret } => LinkMessage {
            what: 1,
            round: node.0,
            statements: vec![StatementMessage {
                text: secret.clone(),
                ..StatementMessage::default()
            }],
            ..empty
        },
        Link::Peer(PeerRollback { xid }) => of(2, xid),
        Link::Order(order) => match order {
            ToAgent::Attach { epoch } => LinkMessage { what: 10, epoch: *epoch, ..empty },
            ToAgent::Ping { epoch, sent, oldest } => {
                LinkMessage { what: 11, epoch: *epoch, time: sent.0, oldest: *oldest, ..empty }
            }
            ToAgent::Execute {
                xid,
                round,
                life,
                peers,
                isolation,
                marks,
                statements,
                writes,
                then,
            } => LinkMessage {
                marks: marks.iter().map(Into::into).collect(),
                round: *round,
                life: *life,
                peers: numbers(peers),
                isolation: place(isolation, &ISOLATIONS),
                statements: statements.iter().map(StatementMessage::from).collect(),
                flag: *writes,
                then: place(then, &THENS),
                ..of(12, xid)
            },
            ToAgent::After { earlier, order } => LinkMessage {
                earlier: earlier.iter().map(|xid| (*xid).into()).collect(),
                ..message(&Link::Order((**order).clone()))
            },
            ToAgent::Prepare { xid, peers } => LinkMessage { peers: numbers(peers), ..of(13, xid) },
            ToAgent::Commit { xid, at, one_phase } => {
                LinkMessage { time: at.0, flag: *one_phase, ..of(14, xid) }
            }
            ToAgent::Rollback { xid } => of(15, xid),
            ToAgent::Scan { epoch } => LinkMessage { what: 16, epoch: *epoch, ..empty },
            ToAgent::Interrupt { xid } => of(17, xid),
        },
        Link::Word(word) => {
            let lives = |message: LinkMessage, fence: &Fence| LinkMessage {
                life: fence.agent,
                source_life: fence.source,
                ..message
            };
            match word {
                FromAgent::Attached { epoch, fence } => {
                    lives(LinkMessage { what: 20, epoch: *epoch, ..empty }, fence)
                }
                FromAgent::Pong { sent, fence, is_attached } => lives(
                    LinkMessage { what: 21, time: sent.0, flag: *is_attached, ..empty },
                    fence,
                ),
                FromAgent::Answered { xid, round, answers, fence, took } => lives(
                    LinkMessage {
                        round: *round,
                        answers: answers.iter().map(answer_message).collect(),
                        time: orthodrome_core::time::nanos(*took),
                        ..of(22, xid)
                    },
                    fence,
                ),
                FromAgent::StatementFailed { xid, round, statement, failure } => LinkMessage {
                    round: *round,
                    then: *statement,
                    failure: Some(failure_message(failure)),
                    ..of(23, xid)
                },
                FromAgent::Failed { xid, failure } => {
                    LinkMessage { failure: Some(failure_message(failure)), ..of(24, xid) }
                }
                FromAgent::Prepared { xid, fence, wrote, floor } => {
                    lives(LinkMessage { flag: *wrote, time: floor.0, ..of(25, xid) }, fence)
                }
                FromAgent::Committed { xid, at } => LinkMessage { time: at.0, ..of(26, xid) },
                FromAgent::Lost { xid } => of(27, xid),
                FromAgent::RolledBack { xid } => of(28, xid),
                FromAgent::Scanned { epoch, prepared } => LinkMessage {
                    what: 29,
                    epoch: *epoch,
                    prepared: prepared.iter().map(|xid| (*xid).into()).collect(),
                    ..empty
                },
                FromAgent::Waits { look, waits, more } => {
                    let ends = waits.iter().flat_map(|wait| [wait.waiter, wait.holder]);
                    let prepared = ends.map(Into::into).collect();
                    LinkMessage { what: 30, epoch: *look, prepared, flag: *more, ..empty }
                }
            }
        }
    }
}

/// Decodes what [`encode`] wrote; none if the bytes are invalid.
pub(crate) fn decode(bytes: &[u8]) -> Option<Link> {
    let m = LinkMessage::decode(bytes).ok()?;
    let xid = m.xid.map(Xid::from);
    let fence = Fence { agent: m.life, source: m.source_life };
    let peers = || m.peers.iter().map(|peer| NodeId(*peer)).collect();
    let order = |order| Some(Link::Order(order));
    let word = |word| Some(Link::Word(word));
    match m.what {
        1 => Some(Link::Hello {
            node: NodeId(m.round),
            secret: m.statements.into_iter().next()?.text,
        }),
        2 => Some(Link::Peer(PeerRollback { xid: xid? })),
        10 => order(ToAgent::Attach { epoch: m.epoch }),
        11 => order(ToAgent::Ping { epoch: m.epoch, sent: Time(m.time), oldest: m.oldest }),
        12 => {
            let execute = ToAgent::Execute {
                xid: xid?,
                round: m.round,
                life: m.life,
                peers: peers(),
                isolation: at(m.isolation, &ISOLATIONS)?,
                marks: m.marks.into_iter().map(mark).collect::<Option<_>>()?,
                statements: m.statements.into_iter().map(Statement::from).collect(),
                writes: m.flag,
                then: at(m.then, &THENS)?,
            };
            let earlier: Vec<Xid> = m.earlier.into_iter().map(Xid::from).collect();
            order(if earlier.is_empty() {
                execute
            } else {
                ToAgent::After { earlier, order: Box::new(execute) }
            })
        }
        13 => order(ToAgent::Prepare { xid: xid?, peers: peers() }),
        14 => order(ToAgent::Commit { xid: xid?, at: Timestamp(m.time), one_phase: m.flag }),
        15 => order(ToAgent::Rollback { xid: xid? }),
        16 => order(ToAgent::Scan { epoch: m.epoch }),
        17 => order(ToAgent::Interrupt { xid: xid? }),
        20 => word(FromAgent::Attached { epoch: m.epoch, fence }),
        21 => word(FromAgent::Pong { sent: Time(m.time), fence, is_attached: m.flag }),
        22 => word(FromAgent::Answered {
            xid: xid?,
            round: m.round,
            answers: m.answers.into_iter().map(answer).collect::<Option<_>>()?,
            fence,
            took: std::time::Duration::from_nanos(m.time),
        }),
        23 => word(FromAgent::StatementFailed {
            xid: xid?,
            round: m.round,
            statement: m.then,
            failure: failure(m.failure?)?,
        }),
        24 => word(FromAgent::Failed { xid: xid?, failure: failure(m.failure?)? }),
        25 => {
            word(FromAgent::Prepared { xid: xid?, fence, wrote: m.flag, floor: Timestamp(m.time) })
        }
        26 => word(FromAgent::Committed { xid: xid?, at: Timestamp(m.time) }),
        27 => word(FromAgent::Lost { xid: xid? }),
        28 => word(FromAgent::RolledBack { xid: xid? }),
        29 => word(FromAgent::Scanned {
            epoch: m.epoch,
            prepared: m.prepared.into_iter().map(Xid::from).collect(),
        }),
        30 => {
            let ends: Vec<Xid> = m.prepared.into_iter().map(Xid::from).collect();
            let wait = |ends: &[Xid]| match ends {
                &[waiter, holder] => Some(Wait { waiter, holder }),
                _ => None,
            };
            let waits = ends.chunks(2).map(wait).collect::<Option<_>>()?;
            word(FromAgent::Waits { look: m.epoch, waits, more: m.flag })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let xid = Xid { middleware: NodeId(1), epoch: 3, number: 9 };
        let fence = Fence { agent: 7, source: 8 };
        let fault = Fault { sqlstate: "40001".into(), number: 1213, message: "no".into() };
        let failed = Failure { reason: Reason::Marked, fault: Some(fault) };
        let column = Column { name: "id".into(), kind: Kind::Other, oid: 25 };
        let answer = Answer {
            columns: vec![column],
            rows: vec![vec![None], vec![Some(vec![])]],
            affected: 2,
            last_insert_id: 5,
            unchanged: 1,
        };
        let row =
            |key: &str| Row { table: "t".into(), key: key.into(), condition: "id = 1".into() };
        let keys = Keys {
            sought: vec![row("1")],
            is_delete: true,
            inserted: vec![row("2")],
            filled: vec!["u".into()],
        };
        let settings = vec![Setting { name: "c".into(), value: "'d'".into() }];
        let (prelude, text) = (vec!["a".into()], "b".into());
        let statement = Statement { prelude, text, keys, settings, may_leave: true };
        let peers = vec![NodeId(2), NodeId(3)];
        for link in [
            Link::Hello { node: NodeId(1), secret: "s".into() },
            Link::Peer(PeerRollback { xid }),
            Link::Order(ToAgent::Attach { epoch: 3 }),
            Link::Order(ToAgent::Ping { epoch: 3, sent: Time(4), oldest: 5 }),
            Link::Order(ToAgent::Execute {
                xid,
                round: 0,
                life: 2,
                peers: peers.clone(),
                isolation: Isolation::ReadCommitted,
                marks: vec![Mark::Back(2), Mark::Release(3), Mark::Set(4)],
                statements: vec![statement],
                writes: true,
                then: Then::Commit,
            }),
            Link::Order(ToAgent::After {
                earlier: vec![Xid { number: 7, ..xid }],
                order: Box::new(ToAgent::Execute {
                    xid,
                    round: 0,
                    life: 2,
                    peers: Vec::new(),
                    isolation: Isolation::Serializable,
                    marks: Vec::new(),
                    statements: Vec::new(),
                    writes: false,
                    then: Then::Wait,
                }),
            }),
            Link::Order(ToAgent::Prepare { xid, peers }),
            Link::Order(ToAgent::Commit { xid, at: Timestamp(6), one_phase: true }),
            Link::Order(ToAgent::Rollback { xid }),
            Link::Order(ToAgent::Scan { epoch: 3 }),
            Link::Order(ToAgent::Interrupt { xid }),
            Link::Word(FromAgent::Attached { epoch: 3, fence }),
            Link::Word(FromAgent::Pong { sent: Time(4), fence, is_attached: true }),
            Link::Word(FromAgent::Answered {
                xid,
                round: 1,
                answers: vec![answer],
                fence,
                took: std::time::Duration::from_micros(5),
            }),
            Link::Word(FromAgent::StatementFailed {
                xid,
                round: 1,
                statement: 2,
                failure: failed.clone(),
            }),
            Link::Word(FromAgent::Failed { xid, failure: Reason::Deadlock.into() }),
            Link::Word(FromAgent::Prepared { xid, fence, wrote: true, floor: Timestamp(9) }),
            Link::Word(FromAgent::Committed { xid, at: Timestamp(1) }),
            Link::Word(FromAgent::Lost { xid }),
            Link::Word(FromAgent::RolledBack { xid }),
            Link::Word(FromAgent::Scanned { epoch: 3, prepared: vec![xid] }),
            Link::Word(FromAgent::Waits {
                look: 6,
                waits: vec![Wait { waiter: xid, holder: Xid { number: 8, ..xid } }],
                more: true,
            }),
        ] {
            assert_eq!(decode(&encode(&link)), Some(link));
        }
        assert_eq!(decode(b"\xff\xff"), None);
        let branches = OrdMap::from([(NodeId(1), true), (NodeId(2), false)]);
        for record in [
            Record::Epoch(4),
            Record::Commit { xid, label: None, at: Timestamp(5), branches },
            Record::Ended(xid),
        ] {
            assert_eq!(decode_record(&encode_record(&record)), Some(record));
        }
    }
}
