//! The tables of `scalardb` beside users' tables at a source, and the SQL for each of its messages.
//!
//! ScalarDB's sources are stores of single records. Here a record's version, and the transaction
//! that has prepared it, are a row of `orthodrome_records` under the record's number. Its value is
//! the user's own row, which is unchanged until the transaction has committed. Until then, the
//! statements of a prepared transaction are in `orthodrome_redo`. No other transaction changes what
//! they read or write, so repeating them has the same result. The coordinator table is
//! `orthodrome_states`. So users' tables need no additional columns, and existing rows are records
//! of the initial version.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::txn::{Key, Read, Version};
use orthodrome_core::{ClientId, NodeId, Timestamp, TxnId};
use orthodrome_geotp::scalardb::{Image, Mark, Msg, Record, State};
use orthodrome_geotp::sql::{Answer, Dialect};

use super::driver::{Fault, Outcome};

/// The key of a record: the number of its source, so that sources have ranges of keys, and its
/// number there.
pub(crate) fn key(place: u16, name: i64) -> Key {
    let mut bytes = place.to_be_bytes().to_vec();
    bytes.extend(name.to_be_bytes());
    bytes.into()
}

/// The first key of a source.
pub(crate) fn first_key(place: u16) -> Key {
    if place == 0 { Key::default() } else { Key::from(&place.to_be_bytes()[..]) }
}

fn number_of(key: &Key) -> i64 {
    let bytes = key.bytes().get(2..).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok());
    bytes.map_or(0, i64::from_be_bytes)
}

/// Creates the tables, if they do not exist.
pub(crate) fn tables(kind: Dialect) -> String {
    // MySQL has no `CREATE INDEX IF NOT EXISTS`.
    let (text, within, after) = match kind {
        Dialect::MariaDb => ("LONGTEXT", ", INDEX orthodrome_prepared (by_client, by_counter)", ""),
        Dialect::PostgreSql => (
            "TEXT",
            "",
            ";\nCREATE INDEX IF NOT EXISTS orthodrome_prepared ON orthodrome_records (by_client, by_counter)",
        ),
    };
    // Numbers of records are hashes: a collision only causes conflicts.
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

/// Whether an error means that the tables do not exist.
pub(crate) fn wants_tables(fault: &Fault) -> bool {
    (fault.sqlstate == "42P01" || fault.number == 1146) && fault.message.contains("orthodrome_")
}

/// Whether an error is that of a [`guard`].
pub(crate) fn is_guard(fault: &Fault) -> bool {
    fault.sqlstate == "21000" || fault.number == 1242
}

/// A statement that fails, together with its batch, if `condition` is true: the subquery has two
/// rows then.
fn guard(condition: &str) -> String {
    format!("SELECT (SELECT 1 UNION ALL SELECT 1 FROM (SELECT 1 AS one) AS once WHERE {condition})")
}

/// Begins a transaction in which every statement sees all earlier commits.
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

/// Begins a transaction in which all statements see the same snapshot.
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

/// The statements of one query batch, and the positions of the relevant answers.
#[derive(Debug, Default)]
pub(crate) struct Text {
    statements: Vec<String>,
    /// The first statement whose answer is relevant.
    wanted: usize,
    /// The first user statement.
    pub(crate) own: usize,
}

impl Text {
    pub(crate) fn text(&self) -> String {
        self.statements.join(";\n")
    }

    fn one(statement: String) -> Self {
        Self { statements: vec![statement], ..Self::default() }
    }
}

/// The query for the current records of these keys.
fn look(keys: &[Key]) -> String {
    let names: Vec<String> = keys.iter().map(|key| number_of(key).to_string()).collect();
    format!(
        "SELECT name, at, client, counter, by_client, by_counter, coordinator, since FROM orthodrome_records \
         WHERE name IN ({})",
        names.join(", ")
    )
}

/// A user's statements after the transaction's earlier writes. All changes are rolled back.
pub(crate) fn evaluate(kind: Dialect, keys: &[Key], redo: &[String], own: &[String]) -> Text {
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

/// Ends a prepared transaction: runs its statements, and sets its records' new version.
pub(crate) fn commit(kind: Dialect, txn: TxnId, at: Timestamp, redo: &str) -> Text {
    let mut statements = begin(kind);
    let (own, mine) = (is_written_by(txn), is_prepared_by(txn));
    // If two proxies end it, the second one waits here, and then finds nothing.
    statements.push(format!("SELECT 1 FROM orthodrome_redo WHERE {own} FOR UPDATE"));
    // A transaction that was prepared twice may have left its statements here after they were run.
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

/// The query for a prepared transaction's statements, in hexadecimal digits.
pub(crate) fn redo_of(txn: TxnId) -> String {
    format!("SELECT redo FROM orthodrome_redo WHERE {}", is_written_by(txn))
}

/// Decodes the statements in a row of the answer to [`redo_of`]; none if they are invalid.
pub(crate) fn decode_redo(row: &[Option<Vec<u8>>]) -> Option<String> {
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
    // This comes first, so that a repeated request finds the effects of the first one, or that it
    // has ended.
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
    // A statement that cannot be executed must be detected before the decision.
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

/// The statements of all images of one source.
fn redo(images: &[Image]) -> String {
    let values = images.iter().filter_map(|image| image.value.as_ref());
    let texts = values.map(|value| String::from_utf8_lossy(&value.0).into_owned());
    texts.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(";\n")
}

/// A message as one query batch; none if it needs more than one.
pub(crate) fn say(kind: Dialect, msg: &Msg) -> Option<Text> {
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

/// The result of a message; none if it is unknown, so that the message must be sent again.
pub(crate) fn hear(msg: &Msg, text: &Text, outcome: &Outcome) -> Option<Msg> {
    let request = msg.request();
    if let Some(fault) = &outcome.fault {
        return match msg {
            // In all other cases nothing is prepared.
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
    let found: OrdMap<i64, (Version, Option<Mark>)> = answer.rows.iter().filter_map(row).collect();
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
    use bytes::Bytes;

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

    /// Runs a message, and returns its result.
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

    /// Requests that are repeated or late are executed once.
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
            // No other transaction can prepare it in the meantime, and a statement that fails
            // cannot be prepared.
            let other = write(2, "UPDATE t SET v = 9");
            assert_eq!(tell(&mut client, kind, &other).await, done(false), "{kind}");
            for _ in 0..2 {
                assert_eq!(tell(&mut client, kind, &commit).await, ended, "{kind}");
            }
            assert_eq!(tell(&mut client, kind, &prepare).await, done(false), "{kind}");
            // In the state that a repeated request can leave, if one request runs while another one
            // ends.
            client.text("INSERT INTO orthodrome_redo VALUES (7, 1, '')").await.unwrap();
            assert_eq!(tell(&mut client, kind, &commit).await, ended, "{kind}");
            let answers = client.text("SELECT v FROM t").await.unwrap();
            assert_eq!(answers[0].rows[0][0].as_deref(), Some(&b"1"[..]), "{kind}");
            let answers =
                client.text("SELECT count(*) FROM orthodrome_records WHERE by_client IS NOT NULL");
            assert_eq!(answers.await.unwrap()[0].rows[0][0].as_deref(), Some(&b"0"[..]), "{kind}");
        }
    }

    /// An error that a source would report only at the end of a transaction is detected by the
    /// prepare.
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
