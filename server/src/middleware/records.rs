//! What `scalardb` keeps beside users' tables at a source, and how each of its messages is said in SQL.
//!
//! Its sources are stores of single records. Here a record's version, and who has prepared it, are a row of
//! `orthodrome_records` under the record's name; what it holds is the user's own row, unchanged until its transaction has
//! committed. A prepared transaction's statements are in `orthodrome_redo` until then: nobody else changes what they
//! read or write, so they come to the same once more. The coordinator table is `orthodrome_states`.
//! So users' tables have no columns of ours, and rows that were there before are records of the initial version.

use std::collections::BTreeMap;

use bytes::Bytes;
use orthodrome_core::txn::{Key, Read, Version};
use orthodrome_core::{ClientId, NodeId, Timestamp, TxnId};
use orthodrome_geotp::scalardb::{Image, Mark, Msg, Record, State};
use orthodrome_geotp::sql::{Answer, Dialect};

use super::driver::{Fault, Outcome};

/// The key of a record: its source's place, so that keys are divided among sources by ranges, and its number there.
pub(super) fn key(place: u16, name: i64) -> Key {
    let mut bytes = place.to_be_bytes().to_vec();
    bytes.extend(name.to_be_bytes());
    Key(Bytes::from(bytes))
}

/// Where keys of a source begin.
pub(super) fn first_key(place: u16) -> Key {
    Key(if place == 0 { Bytes::new() } else { Bytes::copy_from_slice(&place.to_be_bytes()) })
}

fn number_of(key: &Key) -> i64 {
    let bytes = key.0.get(2..).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    bytes.map_or(0, i64::from_be_bytes)
}

/// Makes the tables, if they are not there.
pub(super) fn tables(kind: Dialect) -> String {
    // MySQL has no `CREATE INDEX IF NOT EXISTS`.
    let (text, within, after) = match kind {
        Dialect::MariaDb => ("LONGTEXT", ", INDEX orthodrome_prepared (by_client, by_counter)", ""),
        Dialect::PostgreSql => (
            "TEXT",
            "",
            ";\nCREATE INDEX IF NOT EXISTS orthodrome_prepared ON orthodrome_records (by_client, by_counter)",
        ),
    };
    // Numbers of records are hashes: two that meet only stand in each other's way.
    [
        format!(
            "CREATE TABLE IF NOT EXISTS orthodrome_records (name BIGINT PRIMARY KEY, at BIGINT NOT NULL DEFAULT 0, \
         client BIGINT NOT NULL DEFAULT 0, counter BIGINT NOT NULL DEFAULT 0, by_client BIGINT, by_counter BIGINT, \
         coordinator INT, since BIGINT{within}){after}"
        ),
        format!(
            "CREATE TABLE IF NOT EXISTS orthodrome_redo (client BIGINT, counter BIGINT, redo {text} NOT NULL, \
             PRIMARY KEY (client, counter))"
        ),
        "CREATE TABLE IF NOT EXISTS orthodrome_states (client BIGINT, counter BIGINT, at BIGINT, \
         PRIMARY KEY (client, counter))"
            .to_owned(),
    ]
    .join(";\n")
}

/// Whether a fault says that the tables have not been made.
pub(super) fn wants_tables(fault: &Fault) -> bool {
    (fault.sqlstate == "42P01" || fault.number == 1146) && fault.message.contains("orthodrome_")
}

/// Whether a fault is that of a [`guard`].
pub(super) fn is_guard(fault: &Fault) -> bool {
    fault.sqlstate == "21000" || fault.number == 1242
}

/// Fails, and its text with it, if `condition` is true: it has two answers then.
fn guard(condition: &str) -> String {
    format!("SELECT (SELECT 1 UNION ALL SELECT 1 FROM (SELECT 1 AS one) AS once WHERE {condition})")
}

/// The beginning of a transaction in which every statement sees what is committed.
fn begin(kind: Dialect) -> Vec<String> {
    match kind {
        Dialect::PostgreSql => vec!["BEGIN ISOLATION LEVEL READ COMMITTED".into()],
        Dialect::MariaDb => {
            vec![
                "SET TRANSACTION ISOLATION LEVEL READ COMMITTED".into(),
                "START TRANSACTION".into(),
            ]
        }
    }
}

/// The beginning of one in which all see the same.
fn begin_snapshot(kind: Dialect) -> Vec<String> {
    match kind {
        Dialect::PostgreSql => vec!["BEGIN ISOLATION LEVEL REPEATABLE READ".into()],
        Dialect::MariaDb => vec![
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ".into(),
            "START TRANSACTION WITH CONSISTENT SNAPSHOT".into(),
        ],
    }
}

fn insert_new(kind: Dialect, into: &str, rows: &str) -> String {
    match kind {
        Dialect::PostgreSql => format!("INSERT INTO {into} VALUES {rows} ON CONFLICT DO NOTHING"),
        Dialect::MariaDb => format!("INSERT IGNORE INTO {into} VALUES {rows}"),
    }
}

fn is_written_by(txn: TxnId) -> String {
    format!("client = {} AND counter = {}", txn.client.0, txn.counter)
}

fn is_prepared_by(txn: TxnId) -> String {
    format!("by_client = {} AND by_counter = {}", txn.client.0, txn.counter)
}

/// Statements of one text, and where the answers are that matter.
#[derive(Debug, Default)]
pub(super) struct Text {
    statements: Vec<String>,
    /// The first statement whose answer is wanted.
    wanted: usize,
    /// The first of a user's statements.
    pub(super) own: usize,
}

impl Text {
    pub(super) fn text(&self) -> String {
        self.statements.join(";\n")
    }

    fn one(statement: String) -> Self {
        Self { statements: vec![statement], ..Self::default() }
    }
}

/// The records of these keys, as they are.
fn look(keys: &[Key]) -> String {
    let names: Vec<String> = keys.iter().map(|key| number_of(key).to_string()).collect();
    format!(
        "SELECT name, at, client, counter, by_client, by_counter, coordinator, since FROM orthodrome_records \
         WHERE name IN ({})",
        names.join(", ")
    )
}

/// A user's statements after those that the transaction has written so far. What they change is rolled back.
pub(super) fn evaluate(kind: Dialect, keys: &[Key], redo: &[String], own: &[String]) -> Text {
    let mut statements = begin_snapshot(kind);
    let wanted = statements.len();
    if !keys.is_empty() {
        statements.push(look(keys));
    }
    statements.extend(redo.iter().cloned());
    let first = statements.len();
    statements.extend(own.iter().cloned());
    statements.push("ROLLBACK".into());
    Text { statements, wanted, own: first }
}

/// Ends a prepared transaction: its statements, and its records' new version.
pub(super) fn commit(kind: Dialect, txn: TxnId, at: Timestamp, redo: &str) -> Text {
    let mut statements = begin(kind);
    let (own, mine) = (is_written_by(txn), is_prepared_by(txn));
    // Of two who end it the second waits here, and finds nothing.
    statements.push(format!("SELECT 1 FROM orthodrome_redo WHERE {own} FOR UPDATE"));
    // What was prepared twice may have left its statements here after they were carried out.
    statements.push(guard(&format!(
        "NOT EXISTS (SELECT 1 FROM orthodrome_redo WHERE {own}) \
         OR NOT EXISTS (SELECT 1 FROM orthodrome_records WHERE {mine})"
    )));
    if !redo.is_empty() {
        statements.push(redo.to_owned());
    }
    statements.push(format!(
        "UPDATE orthodrome_records SET at = {}, client = {}, counter = {}, by_client = NULL, by_counter = NULL, \
         coordinator = NULL, since = NULL WHERE {mine}",
        at.0, txn.client.0, txn.counter
    ));
    statements.push(format!("DELETE FROM orthodrome_redo WHERE {own}"));
    statements.push("COMMIT".into());
    Text { statements, ..Text::default() }
}

/// What a prepared transaction writes here, in hexadecimal digits.
pub(super) fn redo_of(txn: TxnId) -> String {
    format!("SELECT redo FROM orthodrome_redo WHERE {}", is_written_by(txn))
}

/// The statements in a row of the answer to [`redo_of`]; none if it cannot be read.
pub(super) fn decode_redo(row: &[Option<Vec<u8>>]) -> Option<String> {
    let digits = row.first()?.as_deref()?;
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.chunks(2).map(pair).collect();
    String::from_utf8(bytes?).ok()
}

fn encode_redo(redo: &str) -> String {
    redo.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn prepare(kind: Dialect, txn: TxnId, mark: &Mark, images: &[Image]) -> Text {
    let mut statements = begin(kind);
    let mine = is_prepared_by(txn);
    // First, so that a request that comes twice finds what the other has left, or that it has ended.
    let redo = redo(images);
    let row = format!("({}, {}, '{}')", txn.client.0, txn.counter, encode_redo(&redo));
    statements.push(insert_new(kind, "orthodrome_redo (client, counter, redo)", &row));
    let rows: Vec<String> =
        images.iter().map(|image| format!("({})", number_of(&image.key))).collect();
    statements.push(insert_new(kind, "orthodrome_records (name)", &rows.join(", ")));
    for image in images {
        let Version { timestamp, writer } = image.read;
        statements.push(format!(
            "UPDATE orthodrome_records SET by_client = {}, by_counter = {}, coordinator = {}, since = {} \
             WHERE name = {} AND at = {} AND {} AND by_client IS NULL",
            txn.client.0,
            txn.counter,
            mark.coordinator.0,
            mark.since.0,
            number_of(&image.key),
            timestamp.0,
            is_written_by(writer),
        ));
    }
    statements.push(guard(&format!(
        "(SELECT count(*) FROM orthodrome_records WHERE {mine}) <> {}",
        images.len()
    )));
    // What cannot be written must be known before it is decided.
    if !redo.is_empty() {
        statements.push("SAVEPOINT orthodrome_tried".into());
        statements.push(redo);
        if kind == Dialect::PostgreSql {
            statements.push("SET CONSTRAINTS ALL IMMEDIATE".into());
        }
        statements.push("ROLLBACK TO SAVEPOINT orthodrome_tried".into());
    }
    statements.push("COMMIT".into());
    Text { statements, ..Text::default() }
}

/// What the images of one source write, one after the other.
fn redo(images: &[Image]) -> String {
    let values = images.iter().filter_map(|image| image.value.as_ref());
    let texts = values.map(|value| String::from_utf8_lossy(&value.0).into_owned());
    texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(";\n")
}

/// A message as one text; none if it takes more than that.
pub(super) fn say(kind: Dialect, msg: &Msg) -> Option<Text> {
    Some(match msg {
        Msg::Read { keys, .. } => Text::one(look(keys)),
        Msg::Prepare { txn, coordinator, since, images, .. } => {
            let mark = Mark { txn: *txn, coordinator: *coordinator, since: *since };
            prepare(kind, *txn, &mark, images)
        }
        Msg::PutState { txn, state, .. } => {
            let at = match state {
                State::Committed(at) => at.0.to_string(),
                State::Aborted => "NULL".into(),
            };
            let row = format!("({}, {}, {at})", txn.client.0, txn.counter);
            let put = insert_new(kind, "orthodrome_states (client, counter, at)", &row);
            Text { statements: vec![put, state_of(*txn)], wanted: 1, own: 0 }
        }
        Msg::GetState { txn, .. } => Text::one(state_of(*txn)),
        Msg::Rollback { txn, .. } => {
            let mut statements = begin(kind);
            statements.push(format!(
                "UPDATE orthodrome_records SET by_client = NULL, by_counter = NULL, coordinator = NULL, since = NULL WHERE {}",
                is_prepared_by(*txn)
            ));
            statements.push(format!("DELETE FROM orthodrome_redo WHERE {}", is_written_by(*txn)));
            statements.push("COMMIT".into());
            Text { statements, ..Text::default() }
        }
        Msg::Commit { .. }
        | Msg::Records { .. }
        | Msg::Prepared { .. }
        | Msg::StateIs { .. }
        | Msg::Ended { .. } => return None,
    })
}

fn state_of(txn: TxnId) -> String {
    format!("SELECT at FROM orthodrome_states WHERE {}", is_written_by(txn))
}

fn number(cell: Option<&Option<Vec<u8>>>) -> Option<u64> {
    std::str::from_utf8(cell?.as_deref()?).ok()?.parse().ok()
}

/// What a message came to; none if that is not known, so that it must be sent again.
pub(super) fn hear(msg: &Msg, text: &Text, outcome: &Outcome) -> Option<Msg> {
    let request = msg.request();
    if let Some(fault) = &outcome.fault {
        return match msg {
            // Whatever it is, nothing is prepared.
            Msg::Prepare { .. } => Some(Msg::Prepared { request, is_done: false }),
            Msg::Commit { .. } if is_guard(fault) => Some(Msg::Ended { request }),
            _ => None,
        };
    }
    let answer = outcome.done.get(text.wanted).map(|(answer, _)| answer);
    match msg {
        Msg::Read { keys, .. } => Some(Msg::Records { request, records: records(keys, answer?) }),
        Msg::Prepare { .. } => Some(Msg::Prepared { request, is_done: true }),
        Msg::PutState { .. } | Msg::GetState { .. } => {
            let state = answer?.rows.first().map(|row| {
                number(row.first()).map_or(State::Aborted, |at| State::Committed(Timestamp(at)))
            });
            Some(Msg::StateIs { request, state })
        }
        Msg::Commit { .. } | Msg::Rollback { .. } => Some(Msg::Ended { request }),
        Msg::Records { .. } | Msg::Prepared { .. } | Msg::StateIs { .. } | Msg::Ended { .. } => {
            None
        }
    }
}

fn records(keys: &[Key], answer: &Answer) -> Vec<Record> {
    let txn = |client: u64, counter: u64| TxnId::new(ClientId(client), counter);
    let row = |row: &Vec<Option<Vec<u8>>>| {
        let name: i64 = std::str::from_utf8(row.first()?.as_deref()?).ok()?.parse().ok()?;
        let cell = |at: usize| number(row.get(at));
        let version = Version { timestamp: Timestamp(cell(1)?), writer: txn(cell(2)?, cell(3)?) };
        let prepared = cell(4).zip(cell(5)).zip(cell(6)).zip(cell(7));
        let mark = prepared.map(|(((client, counter), coordinator), since)| Mark {
            txn: txn(client, counter),
            coordinator: NodeId(u32::try_from(coordinator).unwrap_or_default()),
            since: Timestamp(since),
        });
        Some((name, (version, mark)))
    };
    let found: BTreeMap<i64, (Version, Option<Mark>)> =
        answer.rows.iter().filter_map(row).collect();
    let record = |key: &Key| {
        let (version, prepared) =
            found.get(&number_of(key)).copied().unwrap_or((Version::INITIAL, None));
        Record { key: key.clone(), committed: Read { value: None, version }, prepared }
    };
    keys.iter().map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::super::local::{Client, LocalServer, Refused};
    use super::*;

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(7), counter)
    }

    fn write(counter: u64, text: &str) -> Msg {
        let image = Image {
            key: key(0, 1),
            read: Version::INITIAL,
            value: Some(orthodrome_core::Value(Bytes::copy_from_slice(text.as_bytes()))),
        };
        let (coordinator, since) = (NodeId(1001), Timestamp(1));
        Msg::Prepare { request: 1, txn: txn(counter), coordinator, since, images: vec![image] }
    }

    /// What a message comes to.
    async fn tell(client: &mut Client, kind: Dialect, msg: &Msg) -> Option<Msg> {
        let text = match msg {
            Msg::Commit { txn, at, .. } => commit(kind, *txn, *at, "UPDATE t SET v = v + 1"),
            _ => say(kind, msg).unwrap(),
        };
        let fault = match client.text(&text.text()).await {
            Ok(_) => None,
            Err(Refused::Fault(fault)) => {
                client.text("ROLLBACK").await.unwrap();
                Some(fault)
            }
            Err(broken) => panic!("{broken:?}"),
        };
        hear(msg, &text, &Outcome { fault, ..Outcome::default() })
    }

    /// Whatever is asked for twice, or late, is done once.
    #[tokio::test]
    async fn requests_that_come_again_change_nothing_more() {
        for kind in [Dialect::PostgreSql, Dialect::MariaDb] {
            let directory = tempfile::tempdir().unwrap();
            let server = LocalServer::start(kind, &directory.path().join("server")).unwrap();
            let mut client = Client::enter(&server.login()).await.unwrap();
            let made = "CREATE TABLE t (id INT PRIMARY KEY, v INT); INSERT INTO t VALUES (1, 0)";
            client.text(made).await.unwrap();
            client.text(&tables(kind)).await.unwrap();
            let prepare = write(1, "UPDATE t SET v = v + 1");
            let commit = Msg::Commit { request: 2, txn: txn(1), at: Timestamp(5), keys: vec![] };
            let done = |is_done| Some(Msg::Prepared { request: 1, is_done });
            let ended = Some(Msg::Ended { request: 2 });
            for _ in 0..2 {
                assert_eq!(tell(&mut client, kind, &prepare).await, done(true), "{kind}");
            }
            // Nobody else can prepare it meanwhile, nor what cannot be written.
            let other = write(2, "UPDATE t SET v = 9");
            assert_eq!(tell(&mut client, kind, &other).await, done(false), "{kind}");
            for _ in 0..2 {
                assert_eq!(tell(&mut client, kind, &commit).await, ended, "{kind}");
            }
            assert_eq!(tell(&mut client, kind, &prepare).await, done(false), "{kind}");
            // As a request that came twice could have left it, where a request may be under way while another ends.
            client.text("INSERT INTO orthodrome_redo VALUES (7, 1, '')").await.unwrap();
            assert_eq!(tell(&mut client, kind, &commit).await, ended, "{kind}");
            let answers = client.text("SELECT v FROM t").await.unwrap();
            assert_eq!(answers[0].rows[0][0].as_deref(), Some(&b"1"[..]), "{kind}");
            let answers =
                client.text("SELECT count(*) FROM orthodrome_records WHERE by_client IS NOT NULL");
            assert_eq!(answers.await.unwrap()[0].rows[0][0].as_deref(), Some(&b"0"[..]), "{kind}");
        }
    }

    /// What a source would find wrong only at the end of a transaction is found when it is prepared.
    #[tokio::test]
    async fn what_cannot_be_written_is_not_prepared() {
        let kind = Dialect::PostgreSql;
        let directory = tempfile::tempdir().unwrap();
        let server = LocalServer::start(kind, &directory.path().join("server")).unwrap();
        let mut client = Client::enter(&server.login()).await.unwrap();
        let made = "CREATE TABLE t (id INT PRIMARY KEY, v INT UNIQUE DEFERRABLE INITIALLY DEFERRED); \
                    INSERT INTO t VALUES (1, 0), (2, 1)";
        client.text(made).await.unwrap();
        client.text(&tables(kind)).await.unwrap();
        let prepare = write(1, "UPDATE t SET v = 1 WHERE id = 1");
        let heard = tell(&mut client, kind, &prepare).await;
        assert_eq!(heard, Some(Msg::Prepared { request: 1, is_done: false }));
    }

    #[test]
    fn statements_are_kept_as_they_are() {
        let text = "UPDATE t SET v = 'ä\\''\0'";
        let row = [Some(encode_redo(text).into_bytes())];
        assert_eq!(decode_redo(&row).as_deref(), Some(text));
        for bad in [&b"4"[..], b"zz", b"ff"] {
            assert_eq!(decode_redo(&[Some(bad.to_vec())]), None);
        }
    }
}
