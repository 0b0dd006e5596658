//! A session at a PostgreSQL server.
//!
//! `tokio-postgres` is not used, because it returns the number of rows of a command but not its
//! tag. `PREPARE TRANSACTION` of a failed transaction returns no error, but the tag `ROLLBACK`, and
//! only the tag shows the failure.

use bytes::{BufMut as _, BytesMut};
use orthodrome_geotp::sql::{Answer, Column, Kind};
use tokio::net::TcpStream;

use super::auth::ScramClient;
use super::driver::{Described, Endpoint, Fault, Outcome, Trouble};
use super::postgres_wire::{Body, fields, from_hex, kind, put_text, read, write};
use super::stream::{Stream, malformed};

pub(crate) struct Postgres {
    pub(crate) stream: Stream,
    pub(crate) pid: u32,
    pub(crate) secret: u32,
}

fn fault(body: bytes::Bytes) -> Fault {
    let (sqlstate, message) = fields(body);
    Fault { sqlstate, number: 0, message }
}

impl Postgres {
    pub(crate) async fn connect(to: &Endpoint) -> Result<Self, Trouble> {
        let mut stream = reach(to).await?;
        let mut start = BytesMut::new();
        start.put_i32(196_608);
        let wait = format!("{}", to.lock_wait.as_millis());
        let settings = [
            ("user", to.user.as_str()),
            ("database", &to.database),
            ("application_name", &to.label),
            ("client_encoding", "UTF8"),
            ("DateStyle", "ISO, MDY"),
            ("TimeZone", "UTC"),
            ("extra_float_digits", "1"),
            ("standard_conforming_strings", "on"),
            ("lock_timeout", &wait),
        ];
        let is_bounded = !to.lock_wait.is_zero();
        for (name, value) in settings {
            if name == "lock_timeout" && !is_bounded {
                continue;
            }
            put_text(&mut start, name);
            put_text(&mut start, value);
        }
        start.put_u8(0);
        stream.output.put_i32(start.len() as i32 + 4);
        stream.output.extend_from_slice(&start);
        stream.flush().await?;
        let mut session = Self { stream, pid: 0, secret: 0 };
        session.enter(to).await?;
        Ok(session)
    }

    async fn enter(&mut self, to: &Endpoint) -> Result<(), Trouble> {
        let mut scram = None;
        loop {
            let message = read(&mut self.stream).await?;
            let mut body = Body(message.body.clone());
            match message.tag {
                b'R' => match body.i32()? {
                    0 => {}
                    3 => self.send(b'p', |out| put_text(out, &to.password)).await?,
                    10 => {
                        let (client, first) = ScramClient::new(&to.password);
                        scram = Some(client);
                        self.send(b'p', |out| {
                            put_text(out, "SCRAM-SHA-256");
                            out.put_i32(first.len() as i32);
                            out.extend_from_slice(first.as_bytes());
                        })
                        .await?;
                    }
                    11 => {
                        let text = String::from_utf8_lossy(&body.0).into_owned();
                        let answer =
                            scram.as_mut().and_then(|scram: &mut ScramClient| scram.answer(&text));
                        let answer = answer.ok_or_else(|| {
                            malformed("the server's SCRAM message makes no sense")
                        })?;
                        self.send(b'p', |out| out.extend_from_slice(answer.as_bytes())).await?;
                    }
                    12 => {
                        let text = String::from_utf8_lossy(&body.0).into_owned();
                        if !scram.as_ref().is_some_and(|scram| scram.is_server(&text)) {
                            return Err(malformed("the server does not know the password").into());
                        }
                    }
                    other => {
                        return Err(malformed(&format!(
                            "the server wants authentication {other}; set password_encryption to scram-sha-256 there"
                        ))
                        .into());
                    }
                },
                b'K' => {
                    self.pid = body.i32()? as u32;
                    self.secret = body.i32()? as u32;
                }
                b'E' => return Err(Trouble::Fault(fault(message.body))),
                b'Z' => return Ok(()),
                _ => {}
            }
        }
    }

    async fn send(&mut self, tag: u8, fill: impl FnOnce(&mut BytesMut)) -> std::io::Result<()> {
        write(&mut self.stream.output, tag, fill);
        self.stream.flush().await
    }

    /// Sends a query batch and reads all its answers.
    pub(crate) async fn text(&mut self, text: &str) -> Result<Outcome, Trouble> {
        self.send(b'Q', |out| put_text(out, text)).await?;
        let mut outcome = Outcome::default();
        let mut answer = Answer::default();
        loop {
            let message = read(&mut self.stream).await?;
            let mut body = Body(message.body.clone());
            match message.tag {
                b'T' => answer.columns = columns(&mut body)?,
                b'D' => {
                    let row = row(&mut body, &answer.columns)?;
                    answer.rows.push(row);
                }
                b'C' => {
                    let tag = body.text()?;
                    let count = tag.rsplit(' ').next().and_then(|count| count.parse().ok());
                    answer.affected = count.unwrap_or(0);
                    outcome.done.push((std::mem::take(&mut answer), tag));
                }
                b'I' => outcome.done.push((std::mem::take(&mut answer), String::new())),
                b'E' => {
                    answer = Answer::default();
                    outcome.fault.get_or_insert_with(|| fault(message.body));
                }
                b'G' => self.send(b'f', |out| put_text(out, "COPY is not possible here")).await?,
                b'Z' => return Ok(outcome),
                _ => {}
            }
        }
    }

    /// What a statement takes and gives, without running it.
    pub(crate) async fn describe(&mut self, text: &str) -> Result<Described, Trouble> {
        let out = &mut self.stream.output;
        write(out, b'P', |out| {
            put_text(out, "");
            put_text(out, text);
            out.put_i16(0);
        });
        write(out, b'D', |out| {
            out.put_u8(b'S');
            put_text(out, "");
        });
        write(out, b'S', |_| {});
        self.stream.flush().await?;
        let mut found = Ok(Described::default());
        loop {
            let message = read(&mut self.stream).await?;
            match message.tag {
                b't' => {
                    let mut body = Body(message.body);
                    let count = body.i16()?;
                    let types: std::io::Result<Vec<u32>> =
                        (0..count).map(|_| Ok(body.i32()? as u32)).collect();
                    found = Ok(Described { parameters: types?, columns: Vec::new() });
                }
                b'T' => {
                    let columns = columns(&mut Body(message.body))?;
                    found = found.map(|found| Described { columns, ..found });
                }
                b'E' => found = Err(Trouble::Fault(fault(message.body))),
                b'Z' => return found,
                _ => {}
            }
        }
    }
}

fn columns(body: &mut Body) -> std::io::Result<Vec<Column>> {
    let count = body.i16()?;
    let mut columns = Vec::new();
    for _ in 0..count {
        let name = body.text()?;
        body.bytes(6)?;
        let oid = body.i32()? as u32;
        body.bytes(8)?;
        columns.push(Column { name, kind: kind(oid), oid });
    }
    Ok(columns)
}

fn row(body: &mut Body, columns: &[Column]) -> std::io::Result<Vec<Option<Vec<u8>>>> {
    let count = body.i16()?;
    let mut row = Vec::with_capacity(columns.len());
    for number in 0..count {
        let cell = body.value()?;
        let is_bytes =
            columns.get(number as usize).is_some_and(|column| column.kind == Kind::Bytes);
        row.push(cell.map(|cell| {
            if is_bytes { from_hex(&cell).unwrap_or_else(|| cell.to_vec()) } else { cell.to_vec() }
        }));
    }
    Ok(row)
}

/// Opens a connection, with TLS if the server's certificate must be verified.
async fn reach(to: &Endpoint) -> std::io::Result<Stream> {
    let tcp = TcpStream::connect(&to.address).await?;
    tcp.set_nodelay(true)?;
    let mut stream = Stream::new(tcp);
    if let Some(trust) = &to.trust {
        stream.output.put_i32(8);
        stream.output.put_i32(80_877_103);
        stream.flush().await?;
        stream.fill(1).await?;
        if stream.take(1).first() != Some(&b'S') {
            return Err(malformed("the server has no TLS; set ssl = on there"));
        }
        stream.upgrade(|pipe| trust.wrap(pipe)).await?;
    }
    Ok(stream)
}

/// Asks a server to cancel the statement of a session.
pub(crate) async fn cancel(to: &Endpoint, pid: u32, secret: u32) -> std::io::Result<()> {
    let mut stream = reach(to).await?;
    stream.output.put_i32(16);
    stream.output.put_i32(80_877_102);
    stream.output.put_u32(pid);
    stream.output.put_u32(secret);
    stream.flush().await?;
    // The server closes the connection when it has delivered the signal.
    let _ = stream.fill(1).await;
    Ok(())
}
