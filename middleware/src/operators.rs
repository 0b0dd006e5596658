//! SQL statements for operators: a proxy's transactions, its schedule, its counters, and how a
//! statement would run.

use orthodrome_core::NodeId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::txn::Key;
use orthodrome_geotp::contract::Xid;
use orthodrome_geotp::middleware::{Middleware, Optimizations};
use orthodrome_geotp::sql::{Answer, Column, Kind, Parsed, Value};

use super::driver::Sql;
use super::session::{Reply, Session, SqlError};

pub(crate) fn text_answer(name: &str, lines: impl IntoIterator<Item = String>) -> Answer {
    table(&[name], lines.into_iter().map(|line| vec![line]))
}

pub(crate) fn table(names: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Answer {
    let columns = names
        .iter()
        .map(|name| Column { name: (*name).to_owned(), kind: Kind::Text, oid: 25 })
        .collect();
    let rows: Vec<Vec<_>> = rows
        .into_iter()
        .map(|row| row.into_iter().map(|cell| Some(cell.into_bytes())).collect())
        .collect();
    Answer { columns, affected: rows.len() as u64, rows, ..Answer::default() }
}

impl Session {
    pub(crate) async fn explain(
        &mut self,
        inner: &Parsed,
        values: &[Value],
    ) -> Result<Reply, SqlError> {
        let plan = match self.planned(inner, values).await {
            Ok(plan) => plan,
            Err(refusal) => {
                let lines = self.explain_gathered(inner, values, refusal).await?;
                return Ok(Reply::Rows(text_answer("QUERY PLAN", lines), "EXPLAIN"));
            }
        };
        let mut lines = plan.explain(&self.proxy.catalogue);
        let mut records: OrdMap<NodeId, Vec<Key>> = OrdMap::new();
        for part in &plan.parts {
            if let Some(node) = self.proxy.nodes.get(&part.source) {
                let keys = part.records.iter().map(|r| Key::from(format!("{}:{}", r.table, r.key)));
                records.entry(*node).or_default().extend(keys);
            }
        }
        let planned = match self.proxy.engine.xa() {
            Ok(xa) => xa.ask(move |middleware| middleware.plan(&records)).await.unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        for one in planned {
            let rtt = one.rtt.map_or("not measured yet".into(), |rtt| {
                format!("{:.1} ms", rtt.as_secs_f64() * 1e3)
            });
            lines.push(format!(
                "Schedule: {} round trip {rtt}, forecast {:.1} ms, starts after {:.1} ms",
                self.source_name(one.source),
                one.forecast.as_secs_f64() * 1e3,
                one.postponed.as_secs_f64() * 1e3,
            ));
        }
        Ok(Reply::Rows(text_answer("QUERY PLAN", lines), "EXPLAIN"))
    }

    pub(crate) async fn admin(&mut self, words: &[String]) -> Result<Reply, SqlError> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let answer = match words.as_slice() {
            ["show", "transactions"] => self.in_doubt().await?,
            ["show", "hot"] => self.hot_records().await?,
            ["show", "pools"] => self.pools(),
            ["show", "schedule"] => self.schedule().await?,
            ["show", "notes"] => self.notes(),
            ["alter", "set", name] => {
                let optimizations = optimizations(name).ok_or_else(|| {
                    SqlError::new(
                        "22023",
                        format!("unknown mode `{name}`; use xa, geotp-o1, geotp-o2 or geotp"),
                    )
                })?;
                self.middleware(move |middleware| middleware.optimize(optimizations)).await?;
                return Ok(Reply::done("SET"));
            }
            ["resolve", verb @ ("commit" | "rollback"), xid, "at", source] => {
                self.settle(*verb == "commit", xid, source).await?;
                return Ok(Reply::done("RESOLVE"));
            }
            _ => {
                return Err(SqlError::new(
                    "42601",
                    "use SHOW ORTHODROME TRANSACTIONS | HOT | POOLS | SCHEDULE | NOTES, ALTER ORTHODROME SET xa | geotp-o1 | \
                     geotp-o2 | geotp, or RESOLVE ORTHODROME COMMIT | ROLLBACK transaction AT source",
                ));
            }
        };
        Ok(Reply::Rows(answer, "SHOW"))
    }

    /// Calls a function on the middleware.
    async fn middleware<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Middleware<Sql>) -> R + Send + 'static,
    ) -> Result<R, SqlError> {
        let answer = self.proxy.engine.xa()?.ask(act).await;
        answer.ok_or_else(|| SqlError::new("57P01", "the proxy is shutting down"))
    }

    /// The transactions that are decided, and not carried out at every source yet.
    async fn in_doubt(&self) -> Result<Answer, SqlError> {
        let found = self.middleware(|middleware| middleware.in_doubt()).await?;
        let rows = found.into_iter().map(|one| {
            let sources: Vec<String> =
                one.sources.iter().map(|node| self.source_name(*node)).collect();
            vec![
                one.xid.to_string(),
                if one.commits { "commits" } else { "rolls back" }.into(),
                sources.join(", "),
            ]
        });
        Ok(table(&["transaction", "outcome", "waits for"], rows.collect::<Vec<_>>()))
    }

    /// The hottest records.
    async fn hot_records(&self) -> Result<Answer, SqlError> {
        let found = self.middleware(|middleware| middleware.hottest(20)).await?;
        let rows = found.into_iter().map(|((node, key), spot)| {
            vec![
                self.source_name(node),
                String::from_utf8_lossy(key.bytes()).into_owned(),
                format!("{spot:?}"),
            ]
        });
        Ok(table(&["source", "record", "footprint"], rows.collect::<Vec<_>>()))
    }

    /// The connections to each source.
    fn pools(&self) -> Answer {
        let rows = self.proxy.direct.iter().map(|(id, source)| {
            let (busy, idle) = source.pool();
            let known = self.proxy.catalogue.source(*id);
            let name = known.map_or_else(String::new, |source| source.name.clone());
            vec![name, busy.to_string(), idle.to_string()]
        });
        table(&["source", "branches", "idle"], rows)
    }

    /// When a transaction at all sources would start at each of them.
    async fn schedule(&self) -> Result<Answer, SqlError> {
        let records: OrdMap<NodeId, Vec<Key>> =
            self.proxy.nodes.values().map(|node| (*node, Vec::new())).collect();
        let found = self.middleware(move |middleware| middleware.plan(&records)).await?;
        let rows = found.into_iter().map(|one| {
            let ms = |span: std::time::Duration| format!("{:.1}", span.as_secs_f64() * 1e3);
            vec![
                self.source_name(one.source),
                one.rtt.map_or_else(String::new, ms),
                ms(one.postponed),
            ]
        });
        Ok(table(&["source", "rtt_ms", "starts_after_ms"], rows.collect::<Vec<_>>()))
    }

    /// How often what happened.
    fn notes(&self) -> Answer {
        let mut notes = self.proxy.engine.notes();
        let near = self.proxy.near.iter().flat_map(super::near::Near::notes);
        notes.extend(near.map(|(note, count)| (note.to_owned(), count)));
        table(
            &["note", "count"],
            notes.into_iter().map(|(note, count)| vec![note, count.to_string()]),
        )
    }

    /// Ends a prepared transaction of a lost decision log at one source, as the operator decides.
    async fn settle(&self, commits: bool, xid: &str, source: &str) -> Result<(), SqlError> {
        let xid: Xid = xid.parse().map_err(|error: String| SqlError::new("22023", error))?;
        let found = self.proxy.catalogue.find_source(source).and_then(|id| {
            Some((self.proxy.nodes.get(&id).copied()?, self.proxy.direct.get(&id)?))
        });
        let (node, driver) =
            found.ok_or_else(|| SqlError::new("22023", format!("unknown source `{source}`")))?;
        let xa = self.proxy.engine.xa()?;
        if !driver.prepared().await?.contains(&xid) {
            return Err(SqlError::new(
                "42704",
                format!(
                    "transaction {xid} is not prepared at source {source}; list its prepared transactions as the \
                     documentation of lost decision logs says"
                ),
            ));
        }
        xa.settle(xid, node, commits);
        Ok(())
    }
}

/// A set of optimizations by name.
pub(crate) fn optimizations(name: &str) -> Option<Optimizations> {
    let of = |decentralized_prepare, latency_aware, high_contention| {
        Some(Optimizations { decentralized_prepare, latency_aware, high_contention })
    };
    match name {
        "xa" | "xa-local" | "quro" => of(false, false, false),
        "geotp-o1" | "chiller" => of(true, false, false),
        "geotp-o2" => of(true, true, false),
        "geotp" | "near" => of(true, true, true),
        _ => None,
    }
}
