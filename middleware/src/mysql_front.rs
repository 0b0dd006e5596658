//! The server side of MySQL's protocol: text statements and prepared ones, both password methods,
//! TLS.

use std::io;
use std::sync::Arc;

use orthodrome_core::ordered::OrdMap;

use bytes::{BufMut as _, Bytes, BytesMut};
use orthodrome_geotp::sql::{Answer, Cell, Column, Dialect, Kind, Parsed, Value, parse};
use tokio::sync::Notify;

use super::auth::{caching_sha2, is_same, native, random_bytes};
use super::front::{Front, Place, log_in};
use super::maria::{PROXY, TOO_LONG};
use super::mysql_text::{statement, text};
use super::mysql_wire::{
    AUTOCOMMIT, Body, CONNECT_ATTRS, CONNECT_WITH_DB, DEPRECATE_EOF, FOUND_ROWS, IN_TRANSACTION,
    LONG, MORE_RESULTS, MULTI_RESULTS, MULTI_STATEMENTS, PLUGIN_AUTH, PLUGIN_AUTH_LENENC,
    PROTOCOL_41, PS_MULTI_RESULTS, SECURE_CONNECTION, SSL, TRANSACTIONS, UTF8, code, pass_over,
    put_bytes, put_length, read, write,
};
use super::session::{Reply, Session, SqlError};
use super::stream::{MESSAGE_BYTES_MAX, Stream, TooLong, malformed};

const NATIVE: &str = "mysql_native_password";
const SHA2: &str = "caching_sha2_password";

struct Prepared {
    parsed: Parsed,
    types: Vec<(u8, u8)>,
    /// Parameters that arrive in pieces.
    long: OrdMap<u16, Vec<u8>>,
    /// True if the pieces were too long, and are forgotten.
    is_too_long: bool,
}

impl Prepared {
    /// Forgets its pieces of parameters, and returns what they counted for.
    fn forget_pieces(&mut self) -> usize {
        self.is_too_long = false;
        let pieces = std::mem::take(&mut self.long);
        pieces.values().map(|piece| piece.len() + PIECE_OVERHEAD).sum()
    }
}

/// What each parameter that arrives in pieces counts for, in addition to its bytes.
const PIECE_OVERHEAD: usize = 64;

struct Connection {
    front: Arc<Front>,
    stream: Stream,
    number: u8,
    flags: u32,
    session: Session,
    statements: OrdMap<u32, Prepared>,
    last_statement: u32,
    /// Bytes of parameters that arrive in pieces, of all statements.
    long: usize,
}

/// Serves one client until it disconnects.
pub(crate) async fn serve(front: Arc<Front>, stream: Stream) -> io::Result<()> {
    let cancelled: Arc<Notify> = Arc::default();
    // The number in the greeting is the one that KILL uses.
    let (id, _) = front.enter(cancelled.clone());
    let _place = Place::of(&front, id);
    let entered = log_in(stream, |stream| enter(front.clone(), stream, id)).await?;
    let Some((stream, Entered { number, flags, database, plugin })) = entered else {
        return Ok(());
    };
    let mut session = Session::new(front.proxy.clone(), Dialect::MariaDb);
    session.cancelled = cancelled;
    session.counts_found = flags & FOUND_ROWS != 0;
    let mut connection = Connection {
        front,
        stream,
        number,
        flags,
        session,
        statements: OrdMap::new(),
        last_statement: 0,
        long: 0,
    };
    if plugin == SHA2 {
        // The proxy knows the password, so it never requests it.
        connection.packet(&[1, 3]);
    }
    if let Err(unknown) = connection.session.check_database(&database) {
        connection.error(&unknown);
        return connection.stream.flush().await;
    }
    connection.ok(0, 0, false);
    connection.stream.flush().await?;
    connection.talk().await
}

/// What a login has shown.
struct Entered {
    /// The number of the next packet.
    number: u8,
    /// The capabilities of both ends.
    flags: u32,
    database: String,
    /// The method of authentication.
    plugin: String,
}

/// Logs a client in; none if it may not enter.
async fn enter(
    front: Arc<Front>,
    mut stream: Stream,
    id: u32,
) -> io::Result<Option<(Stream, Entered)>> {
    let nonce = random_bytes::<20>();
    let mut number = 0;
    let own = LONG
        | FOUND_ROWS
        | CONNECT_WITH_DB
        | PROTOCOL_41
        | TRANSACTIONS
        | SECURE_CONNECTION
        | MULTI_STATEMENTS
        | MULTI_RESULTS
        | PS_MULTI_RESULTS
        | PLUGIN_AUTH
        | CONNECT_ATTRS
        | PLUGIN_AUTH_LENENC
        | DEPRECATE_EOF
        | if front.tls.is_some() { SSL } else { 0 };
    let mut hello = BytesMut::new();
    hello.put_u8(10);
    hello.extend_from_slice(format!("8.0.36{PROXY}\0").as_bytes());
    hello.put_u32_le(id);
    hello.extend_from_slice(&nonce[..8]);
    hello.put_u8(0);
    hello.put_u16_le(own as u16);
    hello.put_u8(UTF8 as u8);
    hello.put_u16_le(AUTOCOMMIT);
    hello.put_u16_le((own >> 16) as u16);
    hello.put_u8(21);
    hello.put_bytes(0, 10);
    hello.extend_from_slice(&nonce[8..]);
    hello.put_u8(0);
    hello.extend_from_slice(SHA2.as_bytes());
    hello.put_u8(0);
    write(&mut stream.output, &mut number, &hello);
    stream.flush().await?;
    let mut answer = read(&mut stream, &mut number).await?;
    if answer.len() == 32 {
        // A request for TLS: the rest of the login follows inside TLS.
        let Some(tls) = front.tls.clone() else { return Err(malformed("TLS was not offered")) };
        stream
            .upgrade_at_once(|pipe| async move { Ok(Box::new(tls.accept(pipe).await?) as _) })
            .await?;
        answer = read(&mut stream, &mut number).await?;
    }
    let mut body = Body(answer);
    let flags = body.uint(4)? as u32 & own;
    if flags & PROTOCOL_41 == 0 {
        return Err(malformed("the client is older than MySQL 4.1"));
    }
    body.bytes(4 + 1 + 23)?;
    let user = String::from_utf8_lossy(&body.zero_ended()).into_owned();
    let mut proof = if flags & PLUGIN_AUTH_LENENC != 0 {
        body.value()?.unwrap_or_default()
    } else {
        let length = body.u8()?;
        body.bytes(usize::from(length))?
    };
    let database = if flags & CONNECT_WITH_DB != 0 { body.zero_ended() } else { Bytes::new() };
    let database = String::from_utf8_lossy(&database).into_owned();
    let mut plugin = String::from_utf8_lossy(&body.zero_ended()).into_owned();
    if plugin != NATIVE && plugin != SHA2 {
        // Every client supports this method.
        write(&mut stream.output, &mut number, &switch_to_native(&nonce));
        stream.flush().await?;
        proof = read(&mut stream, &mut number).await?;
        plugin = NATIVE.to_owned();
    }
    let password = front.password(&user);
    let expected = match (password, plugin.as_str()) {
        (Some(password), SHA2) => Some(caching_sha2(password, &nonce)),
        (Some(password), _) => Some(native(password, &nonce)),
        (None, _) => None,
    };
    let is_in = expected.is_some_and(|expected| is_same(&expected, &proof));
    if is_in {
        return Ok(Some((stream, Entered { number, flags, database, plugin })));
    }
    write(&mut stream.output, &mut number, &error_packet(&denied(&user)));
    stream.flush().await?;
    Ok(None)
}

/// `ERR`.
fn error_packet(error: &SqlError) -> BytesMut {
    let mut out = BytesMut::new();
    out.put_u8(0xff);
    out.put_u16_le(if error.number == 0 { 1105 } else { error.number });
    out.put_u8(b'#');
    let mut state = error.sqlstate.clone();
    state.truncate(5);
    out.extend_from_slice(format!("{state:0<5}").as_bytes());
    out.extend_from_slice(error.message.as_bytes());
    out
}

/// Asks the client to authenticate with the method that every client supports.
fn switch_to_native(nonce: &[u8]) -> Vec<u8> {
    let mut switch = vec![0xfe];
    switch.extend_from_slice(NATIVE.as_bytes());
    switch.push(0);
    switch.extend_from_slice(nonce);
    switch.push(0);
    switch
}

fn too_long() -> SqlError {
    SqlError {
        sqlstate: "54000".into(),
        number: TOO_LONG,
        message: format!(
            "Got a packet bigger than 'max_allowed_packet' bytes: the proxy takes {MESSAGE_BYTES_MAX}; split the statement"
        ),
        position: 0,
    }
}

fn denied(user: &str) -> SqlError {
    SqlError::new("28000", format!("Access denied for user '{user}' (using password: YES)"))
}

impl Connection {
    fn packet(&mut self, body: &[u8]) {
        write(&mut self.stream.output, &mut self.number, body);
    }

    fn status(&self, more: bool) -> u16 {
        let open = if self.session.in_transaction() { IN_TRANSACTION } else { 0 };
        let auto = if self.session.is_autocommit() { AUTOCOMMIT } else { 0 };
        open | auto | if more { MORE_RESULTS } else { 0 }
    }

    fn ok(&mut self, affected: u64, last: u64, more: bool) {
        let mut out = BytesMut::new();
        out.put_u8(0);
        put_length(&mut out, affected);
        put_length(&mut out, last);
        out.put_u16_le(self.status(more));
        out.put_u16_le(0);
        self.packet(&out);
    }

    /// Sends the end of columns or of rows.
    fn end(&mut self, more: bool, ends_columns: bool) {
        let mut out = BytesMut::new();
        if self.flags & DEPRECATE_EOF == 0 {
            out.put_u8(0xfe);
            out.put_u16_le(0);
            out.put_u16_le(self.status(more));
        } else if ends_columns {
            return;
        } else {
            out.extend_from_slice(&[0xfe, 0, 0]);
            out.put_u16_le(self.status(more));
            out.put_u16_le(0);
        }
        self.packet(&out);
    }

    fn error(&mut self, error: &SqlError) {
        self.packet(&error_packet(error));
    }

    fn column(&mut self, column: &Column) {
        let (code, charset) = code(column.kind);
        let mut out = BytesMut::new();
        put_bytes(&mut out, b"def");
        for _ in 0..3 {
            put_bytes(&mut out, b"");
        }
        put_bytes(&mut out, column.name.as_bytes());
        put_bytes(&mut out, column.name.as_bytes());
        put_length(&mut out, 12);
        out.put_u16_le(charset);
        out.put_u32_le(1 << 24);
        out.put_u8(code);
        out.put_u16_le(if charset == UTF8 { 0 } else { 0x80 });
        out.put_u8(if column.kind.is_exact() && column.kind != Kind::Decimal { 0 } else { 31 });
        out.put_u16_le(0);
        self.packet(&out);
    }

    fn rows(&mut self, answer: &Answer, more: bool, is_binary: bool) {
        let mut out = BytesMut::new();
        put_length(&mut out, answer.columns.len() as u64);
        self.packet(&out);
        for column in &answer.columns {
            self.column(column);
        }
        self.end(false, true);
        for row in &answer.rows {
            let mut out = BytesMut::new();
            if is_binary {
                put_binary(&mut out, row, &answer.columns);
            } else {
                for (cell, column) in row.iter().zip(&answer.columns) {
                    match cell {
                        None => out.put_u8(0xfb),
                        Some(cell) => put_bytes(&mut out, &shown(cell, column.kind)),
                    }
                }
            }
            self.packet(&out);
        }
        self.end(more, false);
    }

    fn reply(&mut self, reply: &Reply, more: bool, is_binary: bool) {
        match reply {
            Reply::Rows(answer, _) => self.rows(answer, more, is_binary),
            Reply::Done { affected, last_insert_id, .. } => {
                self.ok(*affected, *last_insert_id, more)
            }
            Reply::Error(error) => self.error(error),
        }
    }

    async fn talk(&mut self) -> io::Result<()> {
        loop {
            let packet = match self.next().await {
                Ok(Some(packet)) => packet,
                Ok(None) => return Ok(()),
                // A piece of a parameter gets no answer.
                Err(failed) if TooLong::of(&failed).is_some_and(|long| long.tag != 24) => {
                    pass_over(&mut self.stream, &mut self.number).await?;
                    self.error(&too_long());
                    self.stream.flush().await?;
                    continue;
                }
                Err(failed) => return Err(failed),
            };
            let mut body = Body(packet);
            match body.u8()? {
                // COM_QUIT
                1 => return Ok(()),
                // COM_INIT_DB
                2 => match text(&body.0).and_then(|name| self.session.check_database(&name)) {
                    Ok(()) => self.ok(0, 0, false),
                    Err(unknown) => self.error(&unknown),
                },
                // COM_QUERY
                3 => match statement(&body.0) {
                    Ok(text) => self.query(&text).await,
                    Err(error) => self.error(&error),
                },
                // COM_FIELD_LIST: completion of names, which is not supported.
                4 => self.end(false, false),
                // COM_STATISTICS
                9 => self.packet(b"Orthodrome"),
                // COM_PROCESS_KILL
                12 => {
                    let id = body.uint(4)? as u32;
                    self.killed(id);
                }
                // COM_PING, COM_DEBUG
                14 | 13 => self.ok(0, 0, false),
                // COM_CHANGE_USER, COM_RESET_CONNECTION
                17 => {
                    if !self.change_user(&mut body).await? {
                        return self.stream.flush().await;
                    }
                }
                31 => {
                    self.session.reset().await;
                    self.statements.clear();
                    self.long = 0;
                    self.ok(0, 0, false);
                }
                // COM_STMT_PREPARE
                22 => match statement(&body.0) {
                    Ok(text) => self.prepare(&text).await,
                    Err(error) => self.error(&error),
                },
                // COM_STMT_EXECUTE
                23 => match self.bound(&mut body)? {
                    Ok((parsed, values)) => {
                        let statements = [(parsed, values)];
                        let replies = self.session.run(&statements).await;
                        self.replies(&replies, true);
                    }
                    Err(error) => self.error(&error),
                },
                // COM_STMT_SEND_LONG_DATA: no answer
                24 => {
                    let (id, place) = (body.uint(4)? as u32, body.uint(2)? as u16);
                    self.put_piece(id, place, &body.0);
                    continue;
                }
                // COM_STMT_CLOSE: no answer
                25 => {
                    let id = body.uint(4)? as u32;
                    if let Some(mut statement) = self.statements.remove(&id) {
                        self.long -= statement.forget_pieces();
                    }
                    continue;
                }
                // COM_STMT_RESET
                26 => {
                    let id = body.uint(4)? as u32;
                    if let Some(statement) = self.statements.get_mut(&id) {
                        self.long -= statement.forget_pieces();
                    }
                    self.ok(0, 0, false);
                }
                // COM_SET_OPTION: whether a batch may have several statements.
                27 => {
                    match body.uint(2)? {
                        0 => self.flags |= MULTI_STATEMENTS,
                        _ => self.flags &= !MULTI_STATEMENTS,
                    }
                    self.end(false, false);
                }
                other => {
                    self.error(&SqlError::new("0A000", format!("command {other} is not supported")))
                }
            }
            self.stream.flush().await?;
        }
    }

    /// The next packet; none if the client has been silent for too long.
    async fn next(&mut self) -> io::Result<Option<Bytes>> {
        let read = read(&mut self.stream, &mut self.number);
        let Some((time, _)) = self.session.idle_time() else { return read.await.map(Some) };
        match tokio::time::timeout(time, read).await {
            Ok(packet) => packet.map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Logs another user in, with a new session; false if the login fails.
    async fn change_user(&mut self, body: &mut Body) -> io::Result<bool> {
        let user = String::from_utf8_lossy(&body.zero_ended()).into_owned();
        let length = body.u8()?;
        body.bytes(usize::from(length))?;
        let database = String::from_utf8_lossy(&body.zero_ended()).into_owned();
        let nonce = random_bytes::<20>();
        self.packet(&switch_to_native(&nonce));
        self.stream.flush().await?;
        let proof = read(&mut self.stream, &mut self.number).await?;
        let expected = self.front.password(&user).map(|password| native(password, &nonce));
        if !expected.is_some_and(|expected| is_same(&expected, &proof)) {
            self.error(&denied(&user));
            return Ok(false);
        }
        self.session.reset().await;
        self.statements.clear();
        self.long = 0;
        if let Err(unknown) = self.session.check_database(&database) {
            self.error(&unknown);
            return Ok(false);
        }
        self.ok(0, 0, false);
        Ok(true)
    }

    /// Keeps a piece of a parameter. It gets no answer: if there are too many bytes, the execution
    /// of the statement is refused.
    fn put_piece(&mut self, id: u32, place: u16, piece: &[u8]) {
        let Some(statement) = self.statements.get_mut(&id) else { return };
        let overhead = if statement.long.contains_key(&place) { 0 } else { PIECE_OVERHEAD };
        let bytes = overhead + piece.len();
        if statement.is_too_long || self.long + bytes > MESSAGE_BYTES_MAX {
            self.long -= statement.forget_pieces();
            statement.is_too_long = true;
            return;
        }
        self.long += bytes;
        statement.long.entry(place).or_default().extend_from_slice(piece);
    }

    fn killed(&mut self, id: u32) {
        if self.front.kill(id) {
            self.ok(0, 0, false);
        } else {
            let (sqlstate, message) = ("HY000".into(), format!("Unknown thread id: {id}"));
            self.error(&SqlError { sqlstate, number: 1094, message, position: 0 });
        }
    }

    fn replies(&mut self, replies: &[Reply], is_binary: bool) {
        for (number, reply) in replies.iter().enumerate() {
            self.reply(reply, number + 1 < replies.len(), is_binary);
        }
        if replies.is_empty() {
            self.ok(0, 0, false);
        }
    }

    async fn query(&mut self, text: &str) {
        let words: Vec<&str> = text.split_whitespace().collect();
        if let [kill, rest @ ..] = words.as_slice()
            && kill.eq_ignore_ascii_case("kill")
            && let Some(id) = rest.last().and_then(|id| id.trim_end_matches(';').parse().ok())
        {
            return self.killed(id);
        }
        match parse(text, Dialect::MariaDb) {
            Ok(parsed) => {
                if let ([_, second, ..], 0) = (parsed.as_slice(), self.flags & MULTI_STATEMENTS) {
                    // Otherwise one that was injected would be executed.
                    return self.error(&one_statement(&second.text));
                }
                let statements: Vec<_> =
                    parsed.into_iter().map(|parsed| (parsed, Vec::new())).collect();
                let replies = self.session.run(&statements).await;
                self.replies(&replies, false);
            }
            Err(refusal) => self.error(&refusal.into()),
        }
    }

    async fn prepare(&mut self, text: &str) {
        let parsed = match parse(text, Dialect::MariaDb) {
            Ok(mut parsed) if parsed.len() == 1 => parsed.remove(0),
            Ok(_) => {
                return self
                    .error(&SqlError::new("42000", "a prepared statement is one statement"));
            }
            Err(refusal) => return self.error(&refusal.into()),
        };
        if parsed.parameters > usize::from(u16::MAX) {
            let message = "Prepared statement contains too many placeholders".into();
            let sqlstate = "HY000".into();
            return self.error(&SqlError { sqlstate, number: 1390, message, position: 0 });
        }
        let columns = match self.session.describe(&parsed).await {
            Ok(columns) => columns,
            Err(error) => return self.error(&error),
        };
        self.last_statement += 1;
        let mut out = BytesMut::new();
        out.put_u8(0);
        out.put_u32_le(self.last_statement);
        out.put_u16_le(columns.len() as u16);
        out.put_u16_le(parsed.parameters as u16);
        out.put_u8(0);
        out.put_u16_le(0);
        self.packet(&out);
        if parsed.parameters > 0 {
            let place = Column { name: "?".into(), kind: Kind::Text, oid: 0 };
            for _ in 0..parsed.parameters {
                self.column(&place);
            }
            self.end(false, true);
        }
        if !columns.is_empty() {
            for column in &columns {
                self.column(column);
            }
            self.end(false, true);
        }
        self.statements.insert(
            self.last_statement,
            Prepared { parsed, types: Vec::new(), long: OrdMap::new(), is_too_long: false },
        );
    }

    fn bound(&mut self, body: &mut Body) -> io::Result<Result<(Parsed, Vec<Value>), SqlError>> {
        let id = body.uint(4)? as u32;
        body.bytes(5)?;
        let Some(statement) = self.statements.get_mut(&id) else {
            return Ok(Err(SqlError {
                sqlstate: "HY000".into(),
                number: 1243,
                message: format!("Unknown prepared statement handler ({id})"),
                position: 0,
            }));
        };
        if statement.is_too_long {
            self.long -= statement.forget_pieces();
            return Ok(Err(too_long()));
        }
        let count = statement.parsed.parameters;
        let mut values = Vec::new();
        if count > 0 {
            let nulls = body.bytes(count.div_ceil(8))?;
            if body.u8()? == 1 {
                let mut types = Vec::new();
                for _ in 0..count {
                    types.push((body.u8()?, body.u8()?));
                }
                statement.types = types;
            }
            for number in 0..count {
                let is_null =
                    nulls.get(number / 8).is_some_and(|byte| byte >> (number % 8) & 1 == 1);
                let (code, flags) = statement.types.get(number).copied().unwrap_or((253, 0));
                if let Some(long) = statement.long.get(&(number as u16)) {
                    values.push(of_bytes(long.clone(), code));
                } else if is_null {
                    values.push(Value::Null);
                } else {
                    values.push(parameter(body, code, flags & 0x80 != 0)?);
                }
            }
        }
        self.long -= statement.forget_pieces();
        Ok(Ok((statement.parsed.clone(), values)))
    }
}

/// The error for a second statement of a client that has not asked for several in one batch.
fn one_statement(text: &str) -> SqlError {
    let near: String = text.chars().take(80).collect();
    SqlError {
        sqlstate: "42000".into(),
        number: 1064,
        message: format!(
            "You have an error in your SQL syntax: a batch has one statement unless the client sets \
             CLIENT_MULTI_STATEMENTS; near '{near}'"
        ),
        position: 0,
    }
}

/// A parameter of a prepared statement.
fn parameter(body: &mut Body, code: u8, is_unsigned: bool) -> io::Result<Value> {
    let int = |value: u64, bits: u32| {
        if is_unsigned {
            return Value::Number(value.to_string());
        }
        let shift = 64 - bits;
        Value::Number((((value << shift) as i64) >> shift).to_string())
    };
    Ok(match code {
        1 => int(body.uint(1)?, 8),
        2 | 13 => int(body.uint(2)?, 16),
        3 | 9 => int(body.uint(4)?, 32),
        8 => int(body.uint(8)?, 64),
        4 => Value::Number(f32::from_bits(body.uint(4)? as u32).to_string()),
        5 => Value::Number(f64::from_bits(body.uint(8)?).to_string()),
        6 => Value::Null,
        7 | 10 | 12 => {
            let length = body.u8()?;
            let mut parts = Body(body.bytes(usize::from(length))?);
            if length == 0 {
                return Ok(Value::Text("0000-00-00".into()));
            }
            let (year, month, day) = (parts.uint(2)?, parts.u8()?, parts.u8()?);
            let mut text = format!("{year:04}-{month:02}-{day:02}");
            if length >= 7 {
                text.push_str(&format!(
                    " {:02}:{:02}:{:02}",
                    parts.u8()?,
                    parts.u8()?,
                    parts.u8()?
                ));
            }
            if length >= 11 {
                text.push_str(&format!(".{:06}", parts.uint(4)?));
            }
            Value::Text(text)
        }
        11 => {
            let length = body.u8()?;
            let mut parts = Body(body.bytes(usize::from(length))?);
            if length == 0 {
                return Ok(Value::Text("00:00:00".into()));
            }
            let sign = if parts.u8()? == 1 { "-" } else { "" };
            let days = parts.uint(4)?;
            let hours = days * 24 + u64::from(parts.u8()?);
            let mut text = format!("{sign}{hours:02}:{:02}:{:02}", parts.u8()?, parts.u8()?);
            if length >= 12 {
                text.push_str(&format!(".{:06}", parts.uint(4)?));
            }
            Value::Text(text)
        }
        0 | 246 => {
            let bytes = body.value()?.unwrap_or_default();
            Value::Number(String::from_utf8_lossy(&bytes).into_owned())
        }
        _ => {
            let bytes = body.value()?.unwrap_or_default();
            of_bytes(bytes.to_vec(), code)
        }
    })
}

/// Converts a parameter to bytes, or to text if its type says so and it is valid.
fn of_bytes(bytes: Vec<u8>, code: u8) -> Value {
    // The types of BLOB.
    if matches!(code, 249..=252) {
        return Value::Bytes(bytes);
    }
    String::from_utf8(bytes).map_or_else(|bytes| Value::Bytes(bytes.into_bytes()), Value::Text)
}

/// A value in MySQL's form: booleans are numbers.
fn shown(cell: &[u8], kind: Kind) -> Vec<u8> {
    match (kind, cell) {
        (Kind::Bool, b"t") => b"1".to_vec(),
        (Kind::Bool, b"f") => b"0".to_vec(),
        // The time is in the session's zone, which MySQL does not print.
        (Kind::TimestampTz, cell) => {
            let time = cell.iter().position(|byte| *byte == b' ').unwrap_or(0);
            let zone = cell.iter().skip(time).position(|byte| matches!(byte, b'+' | b'-'));
            let end = zone.map_or(cell.len(), |zone| time + zone);
            cell.get(..end).unwrap_or(cell).to_vec()
        }
        _ => cell.to_vec(),
    }
}

/// Writes a row of a prepared statement's result.
fn put_binary(out: &mut BytesMut, row: &[Cell], columns: &[Column]) {
    out.put_u8(0);
    let mut nulls = vec![0_u8; (row.len() + 9) / 8];
    for (number, cell) in row.iter().enumerate() {
        let bit = number + 2;
        if cell.is_none()
            && let Some(byte) = nulls.get_mut(bit / 8)
        {
            *byte |= 1 << (bit % 8);
        }
    }
    out.extend_from_slice(&nulls);
    for (cell, column) in row.iter().zip(columns) {
        let Some(cell) = cell else { continue };
        let cell = shown(cell, column.kind);
        let text = String::from_utf8_lossy(&cell);
        match column.kind {
            Kind::Bool => out.put_u8(u8::from(cell == b"1")),
            Kind::Int2 => out.put_i16_le(text.parse().unwrap_or(0)),
            Kind::Int4 => out.put_i32_le(text.parse().unwrap_or(0)),
            Kind::Int8 => out.put_i64_le(text.parse().unwrap_or(0)),
            Kind::Float4 => out.put_f32_le(text.parse().unwrap_or(f32::NAN)),
            Kind::Float8 => out.put_f64_le(text.parse().unwrap_or(f64::NAN)),
            Kind::Date | Kind::Timestamp | Kind::TimestampTz => put_date(out, &text),
            Kind::Time => put_time(out, &text),
            Kind::Decimal | Kind::Text | Kind::Bytes | Kind::Json | Kind::Uuid | Kind::Other => {
                put_bytes(out, &cell)
            }
        }
    }
}

fn put_date(out: &mut BytesMut, text: &str) {
    let numbers: Vec<u32> =
        text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0)).collect();
    let number = |place: usize| numbers.get(place).copied().unwrap_or(0);
    let fraction = text.split_once('.').map_or(0, |(_, fraction)| {
        format!("{fraction:0<6}").get(..6).and_then(|f| f.parse().ok()).unwrap_or(0)
    });
    let length: u8 = if fraction > 0 {
        11
    } else if numbers.len() > 3 {
        7
    } else {
        4
    };
    out.put_u8(length);
    out.put_u16_le(number(0) as u16);
    out.put_u8(number(1) as u8);
    out.put_u8(number(2) as u8);
    if length >= 7 {
        (3..6).for_each(|place| out.put_u8(number(place) as u8));
    }
    if length == 11 {
        out.put_u32_le(fraction);
    }
}

fn put_time(out: &mut BytesMut, text: &str) {
    let (is_negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (clock, fraction) = text.split_once('.').unwrap_or((text, ""));
    let numbers: Vec<u32> = clock.split(':').map(|part| part.parse().unwrap_or(0)).collect();
    let number = |place: usize| numbers.get(place).copied().unwrap_or(0);
    let fraction: u32 =
        format!("{fraction:0<6}").get(..6).and_then(|f| f.parse().ok()).unwrap_or(0);
    out.put_u8(if fraction > 0 { 12 } else { 8 });
    out.put_u8(u8::from(is_negative));
    out.put_u32_le(number(0) / 24);
    out.put_u8((number(0) % 24) as u8);
    out.put_u8(number(1) as u8);
    out.put_u8(number(2) as u8);
    if fraction > 0 {
        out.put_u32_le(fraction);
    }
}
