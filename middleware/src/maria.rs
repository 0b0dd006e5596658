//! A session at a MariaDB or MySQL server.
//!
//! The packet layer is shared with the proxy's listener for MySQL clients.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use orthodrome_geotp::sql::{Answer, Column};
use tokio::net::TcpStream;

use super::auth::{caching_sha2, native};
use super::driver::{Endpoint, Fault, Outcome, Setting, Trouble};
use super::mysql_wire::{
    Body, CONNECT_WITH_DB, FOUND_ROWS, LONG, MORE_RESULTS, MULTI_RESULTS, MULTI_STATEMENTS,
    PLUGIN_AUTH, PROTOCOL_41, SECURE_CONNECTION, SSL, TRANSACTIONS, UTF8, kind, read, write,
};
use super::stream::{Stream, malformed};

pub(crate) struct Maria {
    pub(crate) stream: Stream,
    number: u8,
    /// The session's number at the server.
    pub(crate) id: u64,
    /// Settings that differ from those of a new session.
    pub(crate) settings: Vec<Setting>,
    /// True if the server is a proxy.
    is_proxy: bool,
    /// The maximum packet size; a longer packet ends the connection.
    packet_max: usize,
}

/// MariaDB's number for a packet above `max_allowed_packet`.
pub(crate) const TOO_LONG: u16 = 1153;

/// The suffix of a proxy's version, as reported to MySQL clients.
pub(crate) const PROXY: &str = "-orthodrome";

/// The default modes of a session. Servers get query batches without backslash escapes.
pub(crate) const SQL_MODE: &str =
    "STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION";

/// The mode that is added to all modes for servers.
pub(crate) const NO_ESCAPES: &str = "NO_BACKSLASH_ESCAPES";

/// The assignment that restores a setting to its value in a new session.
pub(crate) fn initial(name: &str, lock_wait: Duration) -> String {
    match name {
        "sql_mode" => format!("sql_mode = '{SQL_MODE},{NO_ESCAPES}'"),
        "time_zone" => "time_zone = '+00:00'".into(),
        // If the proxy has no bound, the server's own applies.
        "innodb_lock_wait_timeout" if !lock_wait.is_zero() => {
            format!("innodb_lock_wait_timeout = {}", lock_wait.as_secs().max(1))
        }
        "collation_connection" => "NAMES utf8mb4".into(),
        other => format!("{other} = DEFAULT"),
    }
}

/// How many of the rows that an UPDATE found stayed as they were, from the words in which the
/// server says so: `Rows matched: 3  Changed: 2  Warnings: 0`.
fn unchanged(affected: u64, words: &[u8]) -> u64 {
    let words = String::from_utf8_lossy(words);
    let changed = words.split_once("Rows matched: ").and_then(|(_, rest)| {
        let (_, rest) = rest.split_once("Changed: ")?;
        rest.split_whitespace().next()?.parse().ok()
    });
    changed.map_or(0, |changed| affected.saturating_sub(changed))
}

/// `ERR`.
fn fault(packet: &Bytes) -> Fault {
    let mut body = Body(packet.slice(1..));
    let number = body.uint(2).unwrap_or(0) as u16;
    let rest = String::from_utf8_lossy(&body.0).into_owned();
    let (sqlstate, message) = match rest.strip_prefix('#').and_then(|rest| rest.split_at_checked(5))
    {
        Some((state, message)) => (state.to_owned(), message.to_owned()),
        None => ("HY000".to_owned(), rest),
    };
    Fault { sqlstate, number, message }
}

impl Maria {
    pub(crate) async fn connect(to: &Endpoint) -> Result<Self, Trouble> {
        let tcp = TcpStream::connect(&to.address).await?;
        tcp.set_nodelay(true)?;
        let mut session = Self {
            stream: Stream::new(tcp),
            number: 0,
            id: 0,
            settings: Vec::new(),
            is_proxy: false,
            packet_max: usize::MAX,
        };
        session.enter(to).await?;
        session.set_initial(to.lock_wait).await?;
        Ok(session)
    }

    /// Sets the initial settings of the proxy's sessions.
    async fn set_initial(&mut self, lock_wait: Duration) -> Result<(), Trouble> {
        let mut names = vec!["collation_connection"];
        // A proxy handles the other settings itself.
        if !self.is_proxy {
            names.extend(["sql_mode", "time_zone"]);
            names.extend((!lock_wait.is_zero()).then_some("innodb_lock_wait_timeout"));
        }
        let all: Vec<String> = names.into_iter().map(|name| initial(name, lock_wait)).collect();
        let limit = if self.is_proxy { "" } else { ";SELECT @@max_allowed_packet" };
        let done = self.text(&format!("SET {}{limit}", all.join(", "))).await?.ok()?;
        let cell = done.get(1).and_then(|(answer, _)| answer.rows.first()?.first()?.clone());
        let packet_max = cell.and_then(|cell| String::from_utf8(cell).ok()?.parse().ok());
        self.packet_max = packet_max.unwrap_or(usize::MAX);
        Ok(())
    }

    /// `COM_RESET_CONNECTION`, and the settings of a new session.
    pub(crate) async fn reset(&mut self, lock_wait: Duration) -> Result<(), Trouble> {
        self.number = 0;
        self.send(&[31]).await?;
        let packet = read(&mut self.stream, &mut self.number).await?;
        if packet.first() == Some(&0xff) {
            return Err(Trouble::Fault(fault(&packet)));
        }
        self.settings.clear();
        self.set_initial(lock_wait).await
    }

    async fn enter(&mut self, to: &Endpoint) -> Result<(), Trouble> {
        let greeting = read(&mut self.stream, &mut self.number).await?;
        if greeting.first() == Some(&0xff) {
            return Err(Trouble::Fault(fault(&greeting)));
        }
        let mut body = Body(greeting);
        if body.u8()? != 10 {
            return Err(
                malformed("the server speaks another protocol than MySQL's version 10").into()
            );
        }
        self.is_proxy = body.zero_ended().ends_with(PROXY.as_bytes());
        self.id = body.uint(4)?;
        let mut nonce = body.bytes(8)?.to_vec();
        body.bytes(1)?;
        let has_tls = body.uint(2)? & u64::from(SSL) != 0;
        body.bytes(1 + 2 + 2)?;
        let length = body.u8()?;
        body.bytes(10)?;
        nonce.extend(body.bytes(usize::from(length).saturating_sub(8).max(13))?);
        nonce.truncate(20);
        let plugin = String::from_utf8_lossy(&body.zero_ended()).into_owned();
        let mut flags = LONG
            | FOUND_ROWS
            | CONNECT_WITH_DB
            | PROTOCOL_41
            | TRANSACTIONS
            | SECURE_CONNECTION
            | MULTI_STATEMENTS
            | MULTI_RESULTS
            | PLUGIN_AUTH;
        let mut out = BytesMut::new();
        if to.trust.is_some() {
            flags |= SSL;
        }
        out.put_u32_le(flags);
        out.put_u32_le(1 << 30);
        out.put_u8(UTF8 as u8);
        out.put_bytes(0, 23);
        if let Some(trust) = &to.trust {
            if !has_tls {
                return Err(
                    malformed("the server has no TLS; set ssl_cert and ssl_key there").into()
                );
            }
            // The first part is sent unencrypted, then the whole packet again over TLS.
            self.send(&out).await?;
            self.stream.upgrade(|pipe| trust.wrap(pipe)).await?;
        }
        out.extend_from_slice(to.user.as_bytes());
        out.put_u8(0);
        let proof = proof(&plugin, &to.password, &nonce);
        out.put_u8(proof.len() as u8);
        out.extend_from_slice(&proof);
        out.extend_from_slice(to.database.as_bytes());
        out.put_u8(0);
        out.extend_from_slice(plugin.as_bytes());
        out.put_u8(0);
        self.send(&out).await?;
        loop {
            let packet = read(&mut self.stream, &mut self.number).await?;
            match packet.first() {
                Some(0) => return Ok(()),
                Some(0xff) => return Err(Trouble::Fault(fault(&packet))),
                Some(0xfe) => {
                    let mut body = Body(packet.slice(1..));
                    let plugin = String::from_utf8_lossy(&body.zero_ended()).into_owned();
                    let nonce = body.zero_ended();
                    let answer = super::maria::proof(&plugin, &to.password, &nonce);
                    self.send(&answer).await?;
                }
                // `caching_sha2_password`: 3 means success, 4 asks for the password itself.
                Some(1) if packet.get(1) == Some(&3) => {}
                Some(1) if to.trust.is_some() => {
                    self.send(&[to.password.as_bytes(), &[0]].concat()).await?;
                }
                Some(1) => {
                    return Err(malformed(
                        "the server wants the password in the clear, which is sent over TLS only; give `tls_authority` for \
                         this source, or use mysql_native_password there",
                    )
                    .into());
                }
                _ => {
                    return Err(
                        malformed("the server's answer to the handshake makes no sense").into()
                    );
                }
            }
        }
    }

    async fn send(&mut self, body: &[u8]) -> std::io::Result<()> {
        write(&mut self.stream.output, &mut self.number, body);
        self.stream.flush().await
    }

    /// Sends a query batch and reads all its answers.
    pub(crate) async fn text(&mut self, text: &str) -> Result<Outcome, Trouble> {
        self.number = 0;
        if text.len() >= self.packet_max {
            // The server would close the connection, and its error could get lost.
            let message = format!(
                "Got a packet bigger than 'max_allowed_packet' bytes: the statement has {} bytes, and its server takes {}; \
                 split it, or raise max_allowed_packet at the server",
                text.len(),
                self.packet_max,
            );
            let fault = Fault { sqlstate: "08S01".into(), number: TOO_LONG, message };
            return Ok(Outcome { done: Vec::new(), fault: Some(fault) });
        }
        let mut packet = vec![3];
        packet.extend_from_slice(text.as_bytes());
        self.send(&packet).await?;
        let mut outcome = Outcome::default();
        loop {
            let packet = read(&mut self.stream, &mut self.number).await?;
            let status = match packet.first() {
                Some(0) => {
                    let mut body = Body(packet.slice(1..));
                    let affected = body.length()?.unwrap_or(0);
                    let last_insert_id = body.length()?.unwrap_or(0);
                    let status = body.uint(2)? as u16;
                    let unchanged = unchanged(affected, body.0.get(2..).unwrap_or_default());
                    outcome.done.push((
                        Answer { affected, last_insert_id, unchanged, ..Answer::default() },
                        String::new(),
                    ));
                    status
                }
                Some(0xff) => {
                    outcome.fault = Some(fault(&packet));
                    return Ok(outcome);
                }
                Some(0xfb) => {
                    self.send(&[]).await?;
                    continue;
                }
                _ => {
                    let count = Body(packet).length()?.unwrap_or(0);
                    match self.rows(count).await? {
                        Ok((answer, status)) => {
                            outcome.done.push((answer, String::new()));
                            status
                        }
                        Err(fault) => {
                            outcome.fault = Some(fault);
                            return Ok(outcome);
                        }
                    }
                }
            };
            if status & MORE_RESULTS == 0 {
                return Ok(outcome);
            }
        }
    }

    /// The columns of a query's result, without running it.
    pub(crate) async fn columns(&mut self, text: &str) -> Result<Vec<Column>, Trouble> {
        self.number = 0;
        // COM_STMT_PREPARE
        self.send(&[&[22], text.as_bytes()].concat()).await?;
        let packet = read(&mut self.stream, &mut self.number).await?;
        if packet.first() == Some(&0xff) {
            return Err(Trouble::Fault(fault(&packet)));
        }
        let mut body = Body(packet);
        body.u8()?;
        let (id, columns, parameters) = (body.uint(4)? as u32, body.uint(2)?, body.uint(2)?);
        if parameters > 0 {
            for _ in 0..=parameters {
                read(&mut self.stream, &mut self.number).await?;
            }
        }
        let mut found = Vec::new();
        for _ in 0..columns {
            found.push(self.column().await?);
        }
        if columns > 0 {
            read(&mut self.stream, &mut self.number).await?;
        }
        self.number = 0;
        // COM_STMT_CLOSE gets no answer.
        self.send(&[&[25], &id.to_le_bytes()[..]].concat()).await?;
        Ok(found)
    }

    /// Reads the description of a column.
    async fn column(&mut self) -> std::io::Result<Column> {
        let mut body = Body(read(&mut self.stream, &mut self.number).await?);
        for _ in 0..4 {
            body.value()?;
        }
        let name = body.value()?.unwrap_or_default();
        body.value()?;
        body.length()?;
        let charset = body.uint(2)? as u16;
        body.uint(4)?;
        let code = body.u8()?;
        let flags = body.uint(2)? as u16;
        let name = String::from_utf8_lossy(&name).into_owned();
        Ok(Column { name, kind: kind(code, charset, flags), oid: 0 })
    }

    async fn rows(&mut self, count: u64) -> std::io::Result<Result<(Answer, u16), Fault>> {
        let mut answer = Answer::default();
        for _ in 0..count {
            answer.columns.push(self.column().await?);
        }
        read(&mut self.stream, &mut self.number).await?;
        loop {
            let packet = read(&mut self.stream, &mut self.number).await?;
            match packet.first() {
                Some(0xfe) if packet.len() < 9 => {
                    let status = Body(packet.slice(1..)).uint(4)? >> 16;
                    answer.affected = answer.rows.len() as u64;
                    return Ok(Ok((answer, status as u16)));
                }
                Some(0xff) => return Ok(Err(fault(&packet))),
                _ => {}
            }
            let mut body = Body(packet);
            let mut row = Vec::with_capacity(answer.columns.len());
            for _ in 0..count {
                row.push(body.value()?.map(|cell| cell.to_vec()));
            }
            answer.rows.push(row);
        }
    }
}

fn proof(plugin: &str, password: &str, nonce: &[u8]) -> Vec<u8> {
    match plugin {
        "caching_sha2_password" => caching_sha2(password, nonce),
        _ => native(password, nonce),
    }
}
