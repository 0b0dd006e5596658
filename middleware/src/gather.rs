//! Queries that no source can answer by itself: the proxy gathers the rows that they need, within the
//! transaction, and a source of the client's kind computes the result from these rows.

use orthodrome_core::ordered::OrdMap;

use orthodrome_geotp::contract::Last;
use orthodrome_geotp::sql::gather::{Gather, ROWS_MAX, Step};
use orthodrome_geotp::sql::set::effects;
use orthodrome_geotp::sql::{Answer, Column, Parsed, Value, Verb};

use super::errors::SqlError;
use super::rounds::{Round, TRIES};
use super::session::{Engine, Placed, Reply, Session, reply};

/// Maximum number of bytes of all rows that are gathered for one query. The query that has them as
/// constants must fit into a packet of MariaDB.
const BYTES_MAX: usize = 4 << 20;

/// What a query that is gathered needs.
fn too_much(what: &str) -> SqlError {
    let message = format!(
        "no source can answer this query by itself, and it needs {what}; restrict its tables by more conditions, or \
         place tables that are joined alike"
    );
    // MySQL's number is that of a SELECT which would examine too many rows.
    SqlError { number: 1104, ..SqlError::new("54000", message) }
}

impl Session {
    /// The way to gather for a statement that was refused with `refusal`.
    ///
    /// # Errors
    /// The refusal, if the statement is no query whose rows can be gathered.
    fn gatherable(
        &self,
        parsed: &Parsed,
        values: &[Value],
        refusal: SqlError,
    ) -> Result<Gather, SqlError> {
        let Verb::Data(statement) = &parsed.verb else { return Err(refusal) };
        // The source that computes the result is not part of the transaction.
        let is_possible = refusal.sqlstate == "0A000"
            && matches!(self.proxy.engine, Engine::Xa(_))
            && !effects(statement).calls_unknown;
        let found = match is_possible {
            true => Gather::of(&self.catalogue(), statement, values, self.client)?,
            false => None,
        };
        found.ok_or(refusal)
    }

    /// Whether this statement is one whose rows are gathered.
    pub(crate) async fn is_gathered(&self, parsed: &Parsed, values: &[Value]) -> bool {
        match self.planned(parsed, values).await {
            Ok(_) => false,
            Err(refusal) => self.gatherable(parsed, values, refusal).is_ok(),
        }
    }

    /// Answers a query that was refused with `refusal`.
    pub(crate) async fn gather(
        &mut self,
        parsed: &Parsed,
        values: &[Value],
        refusal: SqlError,
    ) -> Result<Reply, SqlError> {
        let gather = self.gatherable(parsed, values, refusal)?;
        let is_implicit = !self.in_block && self.autocommit && self.open.is_none();
        let isolation = self.isolation();
        let mut answer = self.gathered(&gather, is_implicit).await;
        for _ in 1..TRIES {
            let is_lost =
                answer.as_ref().is_err_and(|error| matches!(&*error.sqlstate, "40001" | "40P01"))
                    && self.open.is_none();
            if !(is_implicit && is_lost) {
                break;
            }
            // Its client has seen nothing of the transaction.
            self.next_isolation = Some(isolation);
            answer = self.gathered(&gather, is_implicit).await;
        }
        if answer.is_err() && is_implicit {
            // Rows that were read are locked until their transaction ends.
            self.end().await;
        }
        answer.map(|answer| Reply::Rows(answer, "SELECT"))
    }

    async fn gathered(&mut self, gather: &Gather, is_implicit: bool) -> Result<Answer, SqlError> {
        let tables: Vec<String> = gather.tables().map(str::to_owned).collect();
        let (home, templates) = self.templates(&tables).await?;
        let mut found: OrdMap<String, Answer> = OrdMap::new();
        let mut bytes = 0;
        loop {
            let (table, answer) = match gather.next(&found) {
                Step::Read(table, parsed) => (table, self.rows_of(&parsed).await?),
                Step::Skip(table) => (table, Answer::default()),
                Step::Finish => break,
            };
            if answer.rows.len() > ROWS_MAX {
                return Err(too_much(&format!("more than {ROWS_MAX} rows of \"{table}\"")));
            }
            let cells = answer.rows.iter().flatten();
            bytes += cells.map(|cell| 8 + cell.as_ref().map_or(0, Vec::len)).sum::<usize>();
            if bytes > BYTES_MAX {
                return Err(too_much(&format!("rows of more than {} MiB", BYTES_MAX >> 20)));
            }
            found.insert(table, answer);
        }
        let text = gather.result(&found, &templates)?;
        let answer = self.ask(home, &text, false).await?;
        if is_implicit {
            self.commit().await?;
        }
        Ok(answer)
    }

    /// Rows of one table, read in the transaction.
    async fn rows_of(&mut self, parsed: &Parsed) -> Result<Answer, SqlError> {
        let plan = self.planned(parsed, &[]).await?;
        let mut round = Round::default();
        let places = self.place(&mut round, &plan, false, false);
        let placed = [Placed::new(plan, "SELECT", places)];
        let mut answers = self.round(round, &placed, Last::No, false).await?;
        let [placed] = &placed;
        match reply(placed, &mut answers, true)? {
            Reply::Rows(answer, _) => Ok(answer),
            Reply::Done { .. } => Ok(Answer::default()),
            Reply::Error(error) => Err(error),
        }
    }

    /// The columns of a query that was refused with `refusal`, if its rows can be gathered.
    pub(crate) async fn columns_gathered(
        &self,
        parsed: &Parsed,
        values: &[Value],
        refusal: SqlError,
    ) -> Result<Vec<Column>, SqlError> {
        let gather = self.gatherable(parsed, values, refusal)?;
        let tables: Vec<String> = gather.tables().map(str::to_owned).collect();
        let (home, templates) = self.templates(&tables).await?;
        self.columns_at(home, &gather.result(&OrdMap::new(), &templates)?).await
    }

    /// How a query that was refused with `refusal` is answered, in lines: the answer of EXPLAIN.
    pub(crate) async fn explain_gathered(
        &self,
        parsed: &Parsed,
        values: &[Value],
        refusal: SqlError,
    ) -> Result<Vec<String>, SqlError> {
        let gather = self.gatherable(parsed, values, refusal)?;
        let home = self.catalogue_home().and_then(|home| self.proxy.catalogue.source(home));
        let home = home.map_or("no source", |home| home.name.as_str());
        let mut lines = vec![format!(
            "Route: the proxy gathers rows, and {home} computes the result; values of tables that were read restrict the \
             tables that are joined to them"
        )];
        for step in gather.statements() {
            let Step::Read(table, parsed) = step else { continue };
            lines.push(format!("  rows of {table}"));
            let plan = self.planned(&parsed, &[]).await?;
            lines.extend(plan.explain(&self.proxy.catalogue).into_iter().skip(1));
        }
        Ok(lines)
    }
}
