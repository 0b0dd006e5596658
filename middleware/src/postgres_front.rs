//! The server side of PostgreSQL's protocol: simple and extended queries, SCRAM, TLS, cancellation.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;

use orthodrome_core::ordered::OrdMap;

use bytes::{BufMut as _, BytesMut};
use orthodrome_geotp::sql::{
    Answer, Cell, Column, CopyForm, Dialect, Kind, Parsed, Value, Verb, parse,
};

use super::auth::ScramServer;
use super::binary;
use super::copy::{Copy, copy_line, name};
use super::front::{Front, Place, log_in};
use super::parameters::parameter;
use super::postgres_wire::{Body, Message, is_not_utf8, kind, put_text, read, to_hex, write};
use super::session::{Reply, Session, SqlError};
use super::settings::SERVER_VERSION;
use super::stream::{MESSAGE_BYTES_MAX, Stream, TooLong, malformed};
use super::told::{does_not_fit, fitted, plan_changed, type_of};

const SSL: i32 = 80_877_103;
const GSS: i32 = 80_877_104;
const CANCEL: i32 = 80_877_102;

struct Prepared {
    parsed: Vec<Parsed>,
    /// The types of its parameters; 0 if a type is not known.
    types: Vec<u32>,
    /// True once a source was asked for types.
    has_types: bool,
    columns: Option<Vec<Column>>,
}

struct Portal {
    parsed: Vec<Parsed>,
    values: Vec<Value>,
    formats: Vec<i16>,
    /// The remaining rows, after an Execute with a limit.
    rest: Option<Rest>,
    columns: Option<Vec<Column>>,
}

impl Portal {
    /// The bytes of its statement and of its values.
    fn bytes(&self) -> usize {
        let text: usize = self.parsed.iter().map(|parsed| parsed.text.len()).sum();
        MESSAGE_OVERHEAD + text + self.values.iter().map(bytes_of).sum::<usize>()
    }
}

/// The rows of a portal that a client reads piece by piece.
struct Rest {
    answer: Answer,
    /// The number of rows that the client has.
    at: usize,
    /// The number of transactions that had ended when the query ran.
    ended: u64,
}

struct Connection {
    stream: Stream,
    session: Session,
    statements: OrdMap<String, Prepared>,
    portals: OrdMap<String, Portal>,
    /// True after an error: messages are skipped until Sync.
    skips: bool,
    /// Statements of this pipeline that will run as one batch, with the messages that precede their
    /// answers.
    queued: Vec<Queued>,
    /// The settings as last reported to the client.
    reported: Vec<(&'static str, String)>,
    /// Bytes of messages, statements and values that the connection keeps. When no statement waits,
    /// they are those of the portals.
    held: usize,
}

/// Maximum number of bytes that a connection keeps between two Syncs.
const PIPELINE_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
/// What each message of a pipeline counts for, in addition to its bytes.
const MESSAGE_OVERHEAD: usize = 64;
/// Answers that wait for a Sync are sent when there are more bytes of them.
const WAITING_BYTES_MAX: usize = 1 << 20;

/// The bytes of a bound value.
fn bytes_of(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::Null | Value::Bool(_) => 0,
            Value::Number(text) | Value::Text(text) => text.len(),
            Value::Bytes(bytes) => bytes.len(),
        }
}

/// The error for a pipeline that is too long.
fn too_much() -> SqlError {
    SqlError::new(
        "54000",
        format!(
            "a pipeline has more than {PIPELINE_BYTES_MAX} bytes that wait for Sync, which is what the proxy takes; \
             none of its waiting statements was executed; send Sync more often"
        ),
    )
}

/// An Execute that waits for the next message of the pipeline, which may be its COMMIT.
struct Queued {
    before: BytesMut,
    parsed: Parsed,
    values: Vec<Value>,
    formats: Vec<i16>,
    /// The columns that the client was told.
    told: Option<Vec<Column>>,
}

/// Serves one client until it disconnects.
pub(crate) async fn serve(front: Arc<Front>, stream: Stream) -> io::Result<()> {
    let Some((mut stream, (user, mut parameters))) =
        log_in(stream, |stream| enter(front.clone(), stream)).await?
    else {
        return Ok(());
    };
    let database = parameters.remove("database").unwrap_or_else(|| user.clone());
    let mut session = Session::new(front.proxy.clone(), Dialect::PostgreSql);
    write(&mut stream.output, b'R', |out| out.put_i32(0));
    let mut begun = session.check_database(&database);
    if begun.is_ok() {
        begun = match settings_of(parameters) {
            Ok(settings) => session.begin_with(settings).await,
            Err(refused) => Err(refused),
        };
    }
    if let Err(refused) = begun {
        error(&mut stream.output, &refused, true);
        return stream.flush().await;
    }
    let (pid, secret) = front.enter(session.cancelled.clone());
    let _place = Place::of(&front, pid);
    let out = &mut stream.output;
    for (name, value) in [
        ("server_version", SERVER_VERSION),
        ("server_encoding", "UTF8"),
        ("integer_datetimes", "on"),
        ("standard_conforming_strings", "on"),
        ("is_superuser", "off"),
        ("session_authorization", &user),
        ("in_hot_standby", "off"),
    ] {
        status(out, name, value);
    }
    write(out, b'K', |out| {
        out.put_u32(pid);
        out.put_u32(secret);
    });
    let connection = Connection {
        stream,
        session,
        statements: OrdMap::new(),
        portals: OrdMap::new(),
        skips: false,
        queued: Vec::new(),
        reported: Vec::new(),
        held: 0,
    };
    connection.talk().await
}

/// Logs a client in, and returns its user and its other startup parameters; none if it only wanted
/// to cancel a statement, or may not enter.
async fn enter(
    front: Arc<Front>,
    mut stream: Stream,
) -> io::Result<Option<(Stream, (String, OrdMap<String, String>))>> {
    let mut parameters = loop {
        stream.fill(8).await?;
        let (length, code) = match stream.peeked() {
            [a, b, c, d, e, f, g, h, ..] => {
                (i32::from_be_bytes([*a, *b, *c, *d]), i32::from_be_bytes([*e, *f, *g, *h]))
            }
            _ => return Err(malformed("the start is cut off")),
        };
        if !(8..=10_000).contains(&length) {
            return Err(malformed("the start has an impossible length"));
        }
        stream.fill(length as usize).await?;
        stream.skip(8);
        let mut body = Body(stream.take(length as usize - 8).freeze());
        match code {
            SSL => match &front.tls {
                Some(tls) => {
                    stream.output.put_u8(b'S');
                    stream.flush().await?;
                    let tls = tls.clone();
                    stream
                        .upgrade(|pipe| async move { Ok(Box::new(tls.accept(pipe).await?) as _) })
                        .await?;
                }
                None => {
                    stream.output.put_u8(b'N');
                    stream.flush().await?;
                }
            },
            GSS => {
                stream.output.put_u8(b'N');
                stream.flush().await?;
            }
            CANCEL => {
                let (pid, secret) = (body.i32()?, body.i32()?);
                front.cancel(pid as u32, secret as u32);
                return Ok(None);
            }
            196_608 => break parameters(&mut body)?,
            _ => return Err(malformed("this version of the protocol is not spoken here")),
        }
    };
    let user = parameters.remove("user").unwrap_or_default();
    if authenticate(&front, &mut stream, &user).await? {
        return Ok(Some((stream, (user, parameters))));
    }
    error(
        &mut stream.output,
        &SqlError::new("28P01", format!("password authentication failed for user \"{user}\"")),
        true,
    );
    stream.flush().await?;
    Ok(None)
}

/// The settings among a client's startup parameters.
fn settings_of(parameters: OrdMap<String, String>) -> Result<Vec<(String, String)>, SqlError> {
    let mut settings = Vec::new();
    for (name, value) in parameters {
        match name.as_str() {
            "replication" if matches!(value.as_str(), "false" | "off" | "no" | "0") => {}
            "replication" => {
                return Err(SqlError::new("0A000", "the proxy does not replicate; ask a source"));
            }
            "options" => settings.extend(options(&value)?),
            // Extensions of the protocol, none of which is supported.
            _ if name.starts_with("_pq_.") => {}
            _ => settings.push((name.to_lowercase(), value)),
        }
    }
    Ok(settings)
}

/// Parses `-c name=value`, as for the server's program; a backslash escapes a blank.
fn options(text: &str) -> Result<Vec<(String, String)>, SqlError> {
    let (mut words, mut chars) = (vec![String::new()], text.chars());
    while let Some(c) = chars.next() {
        let Some(last) = words.last_mut() else { break };
        match c {
            '\\' => last.extend(chars.next()),
            c if c.is_whitespace() => words.push(String::new()),
            c => last.push(c),
        }
    }
    let mut found = Vec::new();
    let mut words = words.into_iter().filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        let assigned = match word.strip_prefix("--") {
            Some(rest) => Some(rest.to_owned()),
            None if word == "-c" => words.next(),
            None => word.strip_prefix("-c").map(str::to_owned),
        };
        let pair = assigned.as_deref().and_then(|assigned| assigned.split_once('='));
        let (name, value) = pair.ok_or_else(|| {
            SqlError::new(
                "42601",
                format!("invalid command-line argument for server process: {word}"),
            )
        })?;
        found.push((name.to_lowercase().replace('-', "_"), value.to_owned()));
    }
    Ok(found)
}

fn status(out: &mut BytesMut, name: &str, value: &str) {
    write(out, b'S', |out| {
        put_text(out, name);
        put_text(out, value);
    });
}

fn parameters(body: &mut Body) -> io::Result<OrdMap<String, String>> {
    let mut found = OrdMap::new();
    loop {
        let name = body.text()?;
        if name.is_empty() {
            return Ok(found);
        }
        found.insert(name, body.text()?);
    }
}

async fn authenticate(front: &Front, stream: &mut Stream, user: &str) -> io::Result<bool> {
    write(&mut stream.output, b'R', |out| {
        out.put_i32(10);
        put_text(out, "SCRAM-SHA-256");
        out.put_u8(0);
    });
    stream.flush().await?;
    let first = read(stream).await?;
    let mut body = Body(first.body);
    if first.tag != b'p' || body.text()? != "SCRAM-SHA-256" {
        return Ok(false);
    }
    let text = body.value()?.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let Some((scram, challenge)) = ScramServer::new(front.password(user), &text) else {
        return Ok(false);
    };
    write(&mut stream.output, b'R', |out| {
        out.put_i32(11);
        out.extend_from_slice(challenge.as_bytes());
    });
    stream.flush().await?;
    let answer = read(stream).await?;
    let Some(last) = scram.check(&String::from_utf8_lossy(&answer.body)) else { return Ok(false) };
    write(&mut stream.output, b'R', |out| {
        out.put_i32(12);
        out.extend_from_slice(last.as_bytes());
    });
    Ok(true)
}

fn error(out: &mut BytesMut, error: &SqlError, is_fatal: bool) {
    write(out, b'E', |out| {
        let severity = if is_fatal { "FATAL" } else { "ERROR" };
        for (field, text) in
            [(b'S', severity), (b'V', severity), (b'C', &error.sqlstate), (b'M', &error.message)]
        {
            out.put_u8(field);
            put_text(out, text);
        }
        if error.position > 0 {
            out.put_u8(b'P');
            put_text(out, &error.position.to_string());
        }
        out.put_u8(0);
    });
}

impl Connection {
    async fn talk(mut self) -> io::Result<()> {
        self.ready().await?;
        loop {
            let (tag, message) = match self.next().await {
                Ok(Some(message)) => (message.tag, Ok(message)),
                Ok(None) => return Ok(()),
                Err(failed) => {
                    let Some(long) = TooLong::of(&failed) else { return Err(failed) };
                    self.stream.discard(long.bytes).await?;
                    let why =
                        format!("{failed}, which is what the proxy takes; split the statement");
                    (long.tag, Err(SqlError::new("54000", why)))
                }
            };
            if tag == b'X' {
                return Ok(());
            }
            if self.skips && tag != b'S' {
                continue;
            }
            let is_simple = tag == b'Q';
            if let (b'P' | b'B' | b'D' | b'E' | b'C', Ok(message)) = (tag, &message) {
                self.held += message.body.len() + MESSAGE_OVERHEAD;
                if self.held + self.stream.output.len() > PIPELINE_BYTES_MAX {
                    self.refuse_pipeline().await;
                    // A client may wait for the error before it sends Sync, and Flush is skipped.
                    self.stream.flush().await?;
                    continue;
                }
            }
            let handled = match message {
                Ok(message) => self.handle(message).await,
                Err(too_long) => Ok(Err(too_long)),
            };
            let mut handled = match handled {
                Err(failed) if is_not_utf8(&failed) => {
                    Err(SqlError::new("22021", failed.to_string()))
                }
                handled => handled?,
            };
            if let (true, Err(failed)) = (is_simple, &handled) {
                error(&mut self.stream.output, failed, false);
                self.session.fail().await;
                self.ready().await?;
                continue;
            }
            if handled.is_err() {
                // Earlier statements are executed first, and may fail first.
                handled = self.run_queued().await?.and(handled);
            }
            if let Err(failed) = handled {
                error(&mut self.stream.output, &failed, false);
                self.skips = true;
                // A client may wait for the error before it sends Sync, and Flush is skipped.
                self.stream.flush().await?;
            }
            if self.queued.is_empty() && self.stream.output.len() > WAITING_BYTES_MAX {
                self.stream.flush().await?;
            }
        }
    }

    /// Forgets a pipeline that is too long, before any of its waiting statements runs.
    async fn refuse_pipeline(&mut self) {
        let before = self.queued.first_mut().map(|first| std::mem::take(&mut first.before));
        if let Some(before) = before {
            // What was answered before the first of these statements is sent.
            self.stream.output = before;
        }
        self.queued.clear();
        self.portals.clear();
        self.held = 0;
        self.session.fail().await;
        error(&mut self.stream.output, &too_much(), false);
        self.skips = true;
    }

    /// When no statement waits, only portals count.
    fn count_portals(&mut self) {
        self.held = self.portals.values().map(Portal::bytes).sum();
    }

    /// The next message; none if the client has been silent for too long.
    async fn next(&mut self) -> io::Result<Option<Message>> {
        let Some((time, is_in_transaction)) = self.session.idle_time() else {
            return read(&mut self.stream).await.map(Some);
        };
        if let Ok(message) = tokio::time::timeout(time, read(&mut self.stream)).await {
            return message.map(Some);
        }
        let late = if is_in_transaction {
            SqlError::new("25P03", "terminating connection due to idle-in-transaction timeout")
        } else {
            SqlError::new("57P05", "terminating connection due to idle-session timeout")
        };
        error(&mut self.stream.output, &late, true);
        self.stream.flush().await?;
        Ok(None)
    }

    async fn ready(&mut self) -> io::Result<()> {
        let reported = self.session.reported();
        for (name, value) in reported.iter().filter(|one| !self.reported.contains(one)) {
            self::status(&mut self.stream.output, name, value);
        }
        self.reported = reported;
        let status = self.session.status();
        write(&mut self.stream.output, b'Z', |out| out.put_u8(status));
        self.stream.flush().await
    }

    async fn handle(&mut self, message: Message) -> io::Result<Result<(), SqlError>> {
        let mut body = Body(message.body);
        match message.tag {
            b'Q' => {
                let text = body.text()?;
                self.simple(&text).await?;
                self.ready().await?;
            }
            b'P' => return self.parse(&mut body),
            b'B' => return self.bind(&mut body).await,
            b'D' => return self.describe(&mut body).await,
            b'E' => return self.execute(&mut body).await,
            b'C' => {
                let (what, name) = (body.u8()?, body.text()?);
                if what == b'S' {
                    self.statements.remove(&name);
                } else {
                    self.portals.remove(&name);
                }
                write(&mut self.stream.output, b'3', |_| {});
            }
            b'S' => {
                self.skips = false;
                if let Err(failed) = self.run_queued().await? {
                    error(&mut self.stream.output, &failed, false);
                }
                // A portal lasts until its transaction ends.
                if self.session.status() == b'I' {
                    self.portals.clear();
                }
                self.count_portals();
                self.ready().await?;
            }
            b'H' => {
                if let Err(failed) = self.run_queued().await? {
                    return Ok(Err(failed));
                }
                self.stream.flush().await?;
            }
            b'd' | b'c' | b'f' => {}
            b'F' => {
                // It is answered as a simple query is: no Sync follows.
                let why = "function calls of the old protocol are not supported";
                error(&mut self.stream.output, &SqlError::new("0A000", why), false);
                self.session.fail().await;
                self.ready().await?;
            }
            _ => return Err(malformed("an unknown message")),
        }
        Ok(Ok(()))
    }

    async fn simple(&mut self, text: &str) -> io::Result<()> {
        self.statements.remove("");
        self.portals.remove("");
        let parsed = match parse(text, Dialect::PostgreSql) {
            Ok(parsed) => parsed,
            Err(refusal) => {
                error(&mut self.stream.output, &refusal.into(), false);
                return Ok(());
            }
        };
        if parsed.is_empty() {
            write(&mut self.stream.output, b'I', |_| {});
            return Ok(());
        }
        if let [Parsed { verb: Verb::CopyOut { query, form }, .. }] = parsed.as_slice() {
            match self.copy_out(query, form).await {
                Ok(count) => complete(&mut self.stream.output, &format!("COPY {count}")),
                Err(failed) => {
                    self.session.fail().await;
                    error(&mut self.stream.output, &failed, false);
                }
            }
            return Ok(());
        }
        if let [Parsed { verb: Verb::Copy { before, table, columns, form }, .. }] =
            parsed.as_slice()
        {
            let table: Vec<String> = before.iter().chain([table]).map(|part| name(part)).collect();
            let copied = self.copy(&table.join("."), columns, form).await?;
            match copied {
                Ok(count) => complete(&mut self.stream.output, &format!("COPY {count}")),
                Err(failed) => error(&mut self.stream.output, &failed, false),
            }
            return Ok(());
        }
        let statements: Vec<_> = parsed.into_iter().map(|parsed| (parsed, Vec::new())).collect();
        let replies = self.session.run(&statements).await;
        for ((parsed, _), reply) in statements.iter().zip(&replies) {
            self.deallocate(parsed, reply);
        }
        let is_utc = self.is_utc();
        for reply in replies {
            match reply {
                Reply::Rows(answer, verb) => {
                    describe_rows(&mut self.stream.output, &answer.columns, &[]);
                    let count = answer.rows.len();
                    let form = Form { formats: &[], told: None, is_utc };
                    if let Err(failed) =
                        put_rows(&mut self.stream.output, &answer.columns, &answer.rows, &form)
                    {
                        error(&mut self.stream.output, &failed, false);
                        return Ok(());
                    }
                    complete(&mut self.stream.output, &tag_of(verb, count));
                }
                Reply::Done { tag, .. } => complete(&mut self.stream.output, &tag),
                Reply::Error(failed) => error(&mut self.stream.output, &failed, false),
            }
        }
        Ok(())
    }

    /// Removes prepared statements if the statement was a DEALLOCATE.
    fn deallocate(&mut self, parsed: &Parsed, reply: &Reply) {
        match (&parsed.verb, reply) {
            (_, Reply::Error(_)) => {}
            (Verb::DiscardAll | Verb::Deallocate(None), _) => self.statements.clear(),
            (Verb::Deallocate(Some(name)), _) => drop(self.statements.remove(name)),
            _ => {}
        }
    }

    /// Runs `COPY … TO STDOUT` as a query, and returns the number of rows.
    async fn copy_out(&mut self, query: &str, form: &CopyForm) -> Result<u64, SqlError> {
        let parsed = parse(query, Dialect::PostgreSql)?;
        if !parsed.iter().all(|one| matches!(one.verb, Verb::Data(_)) && one.word() == "SELECT") {
            return Err(SqlError::new("0A000", "COPY TO takes the rows of a SELECT here"));
        }
        let statements: Vec<_> = parsed.into_iter().map(|parsed| (parsed, Vec::new())).collect();
        let answer = match self.session.run(&statements).await.pop() {
            Some(Reply::Rows(answer, _)) => answer,
            Some(Reply::Error(failed)) => return Err(failed),
            Some(Reply::Done { .. }) | None => Answer::default(),
        };
        let out = &mut self.stream.output;
        write(out, b'H', |out| {
            out.put_u8(0);
            out.put_i16(answer.columns.len() as i16);
            answer.columns.iter().for_each(|_| out.put_i16(0));
        });
        if form.has_header {
            let names: Vec<Cell> = answer
                .columns
                .iter()
                .map(|column| Some(column.name.clone().into_bytes()))
                .collect();
            write(out, b'd', |out| out.extend_from_slice(&copy_line(form, &names)));
        }
        for row in &answer.rows {
            let cells = row.iter().zip(&answer.columns).map(|(cell, column)| {
                let to = type_of(column);
                cell.as_ref().map(|cell| match kind(to) {
                    Kind::Bytes => to_hex(cell),
                    _ => {
                        fitted(cell, column, to, true).map_or_else(|| cell.clone(), Cow::into_owned)
                    }
                })
            });
            let line = copy_line(form, &cells.collect::<Vec<_>>());
            write(out, b'd', |out| out.extend_from_slice(&line));
        }
        write(out, b'c', |_| {});
        Ok(answer.rows.len() as u64)
    }

    /// Runs `COPY … FROM STDIN` as inserts in one transaction, and returns the number of rows. The
    /// name of the table is quoted.
    async fn copy(
        &mut self,
        table: &str,
        columns: &[String],
        form: &CopyForm,
    ) -> io::Result<Result<u64, SqlError>> {
        let is_own = !self.session.in_transaction();
        let mut copy = match self.begin_copy(table, columns, is_own).await {
            Ok(columns) => Copy::new(table, columns, form.clone()),
            Err(failed) => {
                self.session.fail().await;
                return Ok(Err(failed));
            }
        };
        self.stream.flush().await?;
        let copied = loop {
            let message = read(&mut self.stream).await?;
            let inserts = match message.tag {
                b'd' => copy.take(&message.body),
                b'c' => copy.end().map(|last| last.into_iter().collect()),
                b'f' => {
                    let why = Body(message.body).text()?;
                    Err(SqlError::new("57014", format!("COPY from stdin failed: {why}")))
                }
                b'H' | b'S' => continue,
                _ => return Err(malformed("something else came among the rows of a COPY")),
            };
            let done = match inserts {
                Ok(inserts) => self.run_texts(&inserts).await,
                Err(failed) => Err(failed),
            };
            // Rows that arrive after a failure are skipped.
            if message.tag != b'd' || done.is_err() {
                break done;
            }
        };
        let ended = match copied {
            Ok(()) if is_own => self.run_texts(&["COMMIT".to_owned()]).await,
            Ok(()) => Ok(()),
            Err(failed) => {
                self.session.fail().await;
                if is_own {
                    // This rollback cannot fail.
                    let _ = self.run_texts(&["ROLLBACK".to_owned()]).await;
                }
                Err(failed)
            }
        };
        Ok(ended.map(|()| copy.count))
    }

    /// Asks the client for its rows, with their columns.
    async fn begin_copy(
        &mut self,
        table: &str,
        columns: &[String],
        is_own: bool,
    ) -> Result<Vec<Column>, SqlError> {
        self.session.check_failed()?;
        if self.session.is_read_only() {
            return Err(self.session.cannot_write("COPY FROM"));
        }
        let names: Vec<String> = columns.iter().map(|column| name(column)).collect();
        let names = if names.is_empty() { "*".to_owned() } else { names.join(", ") };
        let parsed = parse(&format!("SELECT {names} FROM {table}"), Dialect::PostgreSql)?;
        let columns = match parsed.first() {
            Some(parsed) => self.session.describe(parsed).await?,
            None => Vec::new(),
        };
        if is_own {
            self.run_texts(&["BEGIN".to_owned()]).await?;
        }
        write(&mut self.stream.output, b'G', |out| {
            out.put_u8(0);
            out.put_i16(columns.len() as i16);
            columns.iter().for_each(|_| out.put_i16(0));
        });
        Ok(columns)
    }

    /// Runs batches that return no rows.
    async fn run_texts(&mut self, texts: &[String]) -> Result<(), SqlError> {
        for text in texts {
            let parsed = parse(text, Dialect::PostgreSql)?;
            let statements: Vec<_> =
                parsed.into_iter().map(|parsed| (parsed, Vec::new())).collect();
            if let Some(Reply::Error(failed)) = self.session.run(&statements).await.pop() {
                return Err(failed);
            }
        }
        Ok(())
    }

    fn parse(&mut self, body: &mut Body) -> io::Result<Result<(), SqlError>> {
        let (name, text) = (body.text()?, body.text()?);
        let count = body.u16()?;
        let mut types = Vec::new();
        for _ in 0..count {
            types.push(body.i32()? as u32);
        }
        let parsed = match parse(&text, Dialect::PostgreSql) {
            Ok(parsed) => parsed,
            Err(refusal) => return Ok(Err(refusal.into())),
        };
        if parsed.len() > 1 {
            return Ok(Err(SqlError::new(
                "42601",
                "cannot insert multiple commands into a prepared statement",
            )));
        }
        let wanted = parsed.iter().map(|p| p.parameters).max().unwrap_or(0);
        if wanted > usize::from(u16::MAX) {
            let why =
                format!("a statement has at most 65535 parameters, and this one has {wanted}");
            return Ok(Err(SqlError::new("54023", why)));
        }
        // Parameters without a type are text, which the source converts to what it needs.
        types.resize(types.len().max(wanted), 0);
        self.statements.insert(name, Prepared { parsed, types, has_types: false, columns: None });
        write(&mut self.stream.output, b'1', |_| {});
        Ok(Ok(()))
    }

    /// Asks a source for the types of parameters to which the client has given none.
    async fn learn_types(&mut self, name: &str) {
        let Some(prepared) = self.statements.get(name).filter(|one| !one.has_types) else { return };
        let [parsed] = prepared.parsed.as_slice() else { return };
        if !prepared.types.contains(&0) {
            return;
        }
        let parsed = parsed.clone();
        let learned = self.session.parameter_types(&parsed).await;
        if let Some(prepared) = self.statements.get_mut(name) {
            prepared.has_types = true;
            let own = prepared.types.iter_mut().zip(learned);
            own.filter(|(own, _)| **own == 0).for_each(|(own, learned)| *own = learned);
        }
    }

    async fn bind(&mut self, body: &mut Body) -> io::Result<Result<(), SqlError>> {
        let (portal, name) = (body.text()?, body.text()?);
        let mut formats = Vec::new();
        for _ in 0..body.u16()? {
            formats.push(body.i16()?);
        }
        if formats.contains(&1) {
            // Without its type, nobody knows what the bytes mean.
            self.learn_types(&name).await;
        }
        let Some(prepared) = self.statements.get(&name) else {
            return Ok(Err(SqlError::new(
                "26000",
                format!("prepared statement \"{name}\" does not exist"),
            )));
        };
        let mut values = Vec::new();
        let count = body.u16()?;
        for number in 0..usize::from(count) {
            let value = body.value()?;
            let is_binary = format_of(&formats, number) == 1;
            let oid = prepared.types.get(number).copied().unwrap_or(0);
            let name = format!("parameter ${} of type {oid}", number + 1);
            match parameter(value, oid, is_binary, &name) {
                Ok(value) => values.push(value),
                Err(refused) => return Ok(Err(refused)),
            }
        }
        let mut results = Vec::new();
        for _ in 0..body.u16()? {
            results.push(body.i16()?);
        }
        let wanted = prepared.parsed.iter().map(|p| p.parameters).max().unwrap_or(0);
        if values.len() != wanted {
            let sent = values.len();
            return Ok(Err(SqlError::new(
                "08P01",
                format!(
                    "bind message supplies {sent} parameters, but the statement requires {wanted}"
                ),
            )));
        }
        let bound = Portal {
            parsed: prepared.parsed.clone(),
            values,
            formats: results,
            rest: None,
            columns: prepared.columns.clone(),
        };
        self.portals.insert(portal, bound);
        write(&mut self.stream.output, b'2', |_| {});
        Ok(Ok(()))
    }

    async fn describe(&mut self, body: &mut Body) -> io::Result<Result<(), SqlError>> {
        let is_told = |one: &Queued| {
            matches!(
                one.parsed.verb,
                Verb::Schema(_) | Verb::Other | Verb::Declare { .. } | Verb::Prepare(..)
            )
        };
        if self.queued.iter().any(is_told)
            && let Err(failed) = self.run_queued().await?
        {
            return Ok(Err(failed));
        }
        let (what, name) = (body.u8()?, body.text()?);
        if what == b'S' {
            self.learn_types(&name).await;
        }
        let (parsed, formats, known) = if what == b'S' {
            let Some(prepared) = self.statements.get(&name) else {
                return Ok(Err(SqlError::new(
                    "26000",
                    format!("prepared statement \"{name}\" does not exist"),
                )));
            };
            let types = prepared.types.clone();
            write(&mut self.stream.output, b't', |out| {
                out.put_u16(types.len() as u16);
                types.iter().for_each(|oid| out.put_u32(if *oid == 0 { 25 } else { *oid }));
            });
            (prepared.parsed.first().cloned(), Vec::new(), prepared.columns.clone())
        } else {
            // A cursor is a portal.
            if let Some(columns) = self.session.columns_of_cursor(&name) {
                describe_rows(&mut self.stream.output, &columns, &[]);
                return Ok(Ok(()));
            }
            let Some(portal) = self.portals.get(&name) else {
                return Ok(Err(SqlError::new(
                    "34000",
                    format!("portal \"{name}\" does not exist"),
                )));
            };
            (portal.parsed.first().cloned(), portal.formats.clone(), portal.columns.clone())
        };
        let columns = match (known, parsed) {
            (Some(known), _) => known,
            (None, None) => Vec::new(),
            (None, Some(parsed)) => match self.session.describe(&parsed).await {
                Ok(columns) => columns,
                Err(failed) => return Ok(Err(failed)),
            },
        };
        if columns.is_empty() {
            write(&mut self.stream.output, b'n', |_| {});
        } else {
            describe_rows(&mut self.stream.output, &columns, &formats);
        }
        if what == b'S' {
            if let Some(prepared) = self.statements.get_mut(&name) {
                prepared.columns = Some(columns);
            }
        } else if let Some(portal) = self.portals.get_mut(&name) {
            portal.columns = Some(columns);
        }
        Ok(Ok(()))
    }

    async fn execute(&mut self, body: &mut Body) -> io::Result<Result<(), SqlError>> {
        let (name, limit) = (body.text()?, body.i32()?);
        let Some(portal) = self.portals.get_mut(&name) else {
            return Ok(Err(SqlError::new("34000", format!("portal \"{name}\" does not exist"))));
        };
        let Some(parsed) = portal.parsed.first().cloned() else {
            write(&mut self.stream.output, b'I', |_| {});
            return Ok(Ok(()));
        };
        let (values, formats) = (portal.values.clone(), portal.formats.clone());
        let told = portal.columns.clone();
        let rest = portal.rest.take();
        if rest.is_none() && limit <= 0 {
            self.held += parsed.text.len() + values.iter().map(bytes_of).sum::<usize>();
            let before = std::mem::take(&mut self.stream.output);
            self.held += before.len();
            self.queued.push(Queued { before, parsed, values, formats, told });
            return Ok(Ok(()));
        }
        if let Err(failed) = self.run_queued().await? {
            return Ok(Err(failed));
        }
        let Rest { answer, at, ended } = match rest {
            Some(rest) => {
                if let Err(failed) = self.session.check_failed() {
                    return Ok(Err(failed));
                }
                if rest.ended != self.session.ended {
                    // Its transaction has ended, and with it the portal.
                    self.portals.remove(&name);
                    let why = format!("portal \"{name}\" does not exist");
                    return Ok(Err(SqlError::new("34000", why)));
                }
                rest
            }
            None => match self.session.run(&[(parsed, values)]).await.pop() {
                Some(Reply::Rows(answer, _)) => Rest { answer, at: 0, ended: self.session.ended },
                Some(Reply::Done { tag, .. }) => {
                    complete(&mut self.stream.output, &tag);
                    return Ok(Ok(()));
                }
                Some(Reply::Error(failed)) => return Ok(Err(failed)),
                None => return Ok(Ok(())),
            },
        };
        let count = answer.rows.len();
        let end = if limit > 0 { at.saturating_add(limit as usize).min(count) } else { count };
        let rows = answer.rows.get(at..end).unwrap_or_default();
        let form = Form { formats: &formats, told: told.as_deref(), is_utc: self.is_utc() };
        if let Err(failed) = put_rows(&mut self.stream.output, &answer.columns, rows, &form) {
            self.session.fail().await;
            return Ok(Err(failed));
        }
        if end < count {
            write(&mut self.stream.output, b's', |_| {});
        } else {
            complete(&mut self.stream.output, &tag_of("SELECT", end - at));
        }
        if let Some(portal) = self.portals.get_mut(&name) {
            // A portal that is at its end stays there, and its rows are not needed any more.
            let (answer, at) = if end < count {
                (answer, end)
            } else {
                (Answer { columns: answer.columns, ..Answer::default() }, 0)
            };
            portal.rest = Some(Rest { answer, at, ended });
        }
        Ok(Ok(()))
    }

    /// Whether times are shown in UTC.
    fn is_utc(&self) -> bool {
        let reported = self.session.reported();
        let zone = reported.iter().find(|(name, _)| *name == "TimeZone");
        zone.is_none_or(|(_, zone)| matches!(&*zone.to_lowercase(), "" | "utc" | "etc/utc" | "gmt"))
    }

    /// Runs the queued statements as one batch.
    async fn run_queued(&mut self) -> io::Result<Result<(), SqlError>> {
        if self.queued.is_empty() {
            return Ok(Ok(()));
        }
        let queued = std::mem::take(&mut self.queued);
        let after = std::mem::take(&mut self.stream.output);
        let statements: Vec<_> =
            queued.iter().map(|one| (one.parsed.clone(), one.values.clone())).collect();
        let replies = self.session.run(&statements).await;
        self.count_portals();
        for (reply, Queued { parsed, .. }) in replies.iter().zip(&queued) {
            self.deallocate(parsed, reply);
        }
        let is_utc = self.is_utc();
        let out = &mut self.stream.output;
        for (reply, Queued { before, formats, told, .. }) in replies.into_iter().zip(&queued) {
            out.extend_from_slice(before);
            match reply {
                Reply::Rows(answer, verb) => {
                    let count = answer.rows.len();
                    let form = Form { formats, told: told.as_deref(), is_utc };
                    if let Err(failed) = put_rows(out, &answer.columns, &answer.rows, &form) {
                        self.session.fail().await;
                        return Ok(Err(failed));
                    }
                    complete(out, &tag_of(verb, count));
                }
                Reply::Done { tag, .. } => complete(out, &tag),
                Reply::Error(failed) => return Ok(Err(failed)),
            }
        }
        out.extend_from_slice(&after);
        Ok(Ok(()))
    }
}

fn tag_of(verb: &str, count: usize) -> String {
    match verb {
        "SHOW" | "EXPLAIN" => verb.to_owned(),
        "INSERT" => format!("INSERT 0 {count}"),
        _ => format!("{verb} {count}"),
    }
}

fn complete(out: &mut BytesMut, tag: &str) {
    write(out, b'C', |out| put_text(out, tag));
}

fn format_of(formats: &[i16], number: usize) -> i16 {
    match formats {
        [] => 0,
        [one] => *one,
        many => many.get(number).copied().unwrap_or(0),
    }
}

fn describe_rows(out: &mut BytesMut, columns: &[Column], formats: &[i16]) {
    write(out, b'T', |out| {
        out.put_i16(columns.len() as i16);
        for (number, column) in columns.iter().enumerate() {
            put_text(out, &column.name);
            out.put_i32(0);
            out.put_i16(0);
            out.put_u32(type_of(column));
            out.put_i16(-1);
            out.put_i32(-1);
            out.put_i16(format_of(formats, number));
        }
    });
}

/// The form in which a client expects rows.
struct Form<'a> {
    formats: &'a [i16],
    /// The columns that it was told, if it has asked.
    told: Option<&'a [Column]>,
    /// True if times are shown in UTC.
    is_utc: bool,
}

fn put_rows(
    out: &mut BytesMut,
    columns: &[Column],
    rows: &[Vec<Cell>],
    form: &Form<'_>,
) -> Result<(), SqlError> {
    let &Form { formats, told, is_utc } = form;
    let told = told.filter(|told| !told.is_empty()).unwrap_or(columns);
    if told.len() != columns.len() {
        return Err(plan_changed());
    }
    let types: Vec<u32> = told.iter().map(type_of).collect();
    for row in rows {
        let mut cells = Vec::with_capacity(row.len());
        for (number, ((cell, column), to)) in row.iter().zip(columns).zip(&types).enumerate() {
            let (to, kind) = (*to, kind(*to));
            let Some(cell) = cell else {
                cells.push(None);
                continue;
            };
            let cell = fitted(cell, column, to, is_utc).ok_or_else(|| does_not_fit(column, to))?;
            if format_of(formats, number) == 1 {
                let binary = binary::field(&cell, to).ok_or_else(|| {
                    SqlError::new(
                        "0A000",
                        format!(
                            "column \"{}\" cannot be sent in binary form; ask for text",
                            column.name
                        ),
                    )
                })?;
                cells.push(Some(binary));
            } else if kind == Kind::Bytes {
                cells.push(Some(to_hex(&cell)));
            } else {
                cells.push(Some(cell.into_owned()));
            }
        }
        write(out, b'D', |out| {
            out.put_i16(cells.len() as i16);
            for cell in cells {
                match cell {
                    None => out.put_i32(-1),
                    Some(cell) => {
                        out.put_i32(cell.len() as i32);
                        out.extend_from_slice(&cell);
                    }
                }
            }
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(kind: Kind) -> Column {
        Column { name: "c".into(), kind, oid: 0 }
    }

    #[test]
    fn a_result_with_other_columns_than_were_described_is_refused() {
        let (told, sent) = ([column(Kind::Int4)], [column(Kind::Int4), column(Kind::Text)]);
        let rows = [vec![Some(b"1".to_vec()), Some(b"a".to_vec())]];
        let form = Form { formats: &[1], told: Some(&told), is_utc: true };
        let mut out = BytesMut::new();
        let refused = put_rows(&mut out, &sent, &rows, &form).unwrap_err();
        assert_eq!(refused.sqlstate, "0A000");
        assert!(out.is_empty());
    }

    #[test]
    fn a_sum_that_mariadb_computes_is_sent_as_the_type_that_was_described() {
        let form = |told| Form { formats: &[1], told: Some(told), is_utc: true };
        let rows = [vec![Some(b"10".to_vec())]];
        let mut out = BytesMut::new();
        let told = [Column { oid: 20, ..column(Kind::Int8) }];
        put_rows(&mut out, &[column(Kind::Decimal)], &rows, &form(&told)).unwrap();
        assert!(out.ends_with(&[0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 10]), "{out:?}");
        let told = [Column { oid: 16, ..column(Kind::Bool) }];
        put_rows(&mut out, &[column(Kind::Int2)], &rows, &form(&told)).unwrap();
        assert!(out.ends_with(&[0, 0, 0, 1, 1]), "{out:?}");
    }

    #[test]
    fn options_of_a_client_are_settings() {
        let of = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(
            options(r"-c statement_timeout=5s  -cgeqo=off --search-path=a\ b,c").ok(),
            Some(of(&[("statement_timeout", "5s"), ("geqo", "off"), ("search_path", "a b,c")]))
        );
        assert!(options("-c x").is_err() && options("-W").is_err());
    }
}
