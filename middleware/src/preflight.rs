//! `proxy --check`: connects to every source, and finds the settings and privileges that are missing
//! there, and the unique keys that hold at one source only.

use orthodrome_geotp::sql::{Answer, Dialect, SourceId, Table};
use tokio::task::JoinSet;

use super::config::ProxyConfig;
use super::driver::{Endpoint, Session, Trouble};
use super::shapes::{questions, shapes};
use super::source::in_time;
use orthodrome_server::Going;

/// What was found at a source, or at a replica.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inspected {
    /// Its name in the file.
    pub name: String,
    /// The version of the server; empty if the server cannot be reached.
    pub version: String,
    /// What is missing, and how to get it.
    pub problems: Vec<String>,
    /// What works otherwise than at one server.
    pub notes: Vec<String>,
}

/// Whether the server has enough slots for prepared transactions, and the user's privileges.
const POSTGRES: &str = "\
    SELECT current_setting('server_version'), \
    current_setting('server_version_num')::int >= 150000, \
    current_setting('max_prepared_transactions')::int > 0, \
    coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), \
    coalesce(has_table_privilege(to_regclass('orthodrome_proxies'), 'SELECT') \
        AND has_table_privilege(to_regclass('orthodrome_proxies'), 'INSERT') \
        AND has_table_privilege(to_regclass('orthodrome_proxies'), 'UPDATE'), false), \
    has_database_privilege(current_database(), 'CREATE')";

/// The tables of the proxy that exist, and whether the user may create tables.
const MARIA: &str = "\
    SELECT VERSION(), \
    (SELECT count(*) = 2 FROM information_schema.tables WHERE table_schema = database() \
        AND table_name IN ('orthodrome_proxies', 'orthodrome_branches')), \
    EXISTS (SELECT 1 FROM information_schema.user_privileges WHERE privilege_type = 'CREATE') \
    OR EXISTS (SELECT 1 FROM information_schema.schema_privileges \
        WHERE table_schema = database() AND privilege_type = 'CREATE'), \
    EXISTS (SELECT 1 FROM information_schema.user_privileges WHERE privilege_type = 'CREATE') \
    OR EXISTS (SELECT 1 FROM information_schema.schema_privileges \
        WHERE 'orthodrome_catalogue_1' LIKE replace(table_schema, char(92), '') AND privilege_type = 'CREATE')";

/// MariaDB refuses this without the privilege `PROCESS`.
const MARIA_WAITS: &str = "SELECT count(*) FROM information_schema.innodb_trx";

/// Inspects every source of a proxy and the replicas that it would use.
pub fn inspect(config: &ProxyConfig) -> Going<Vec<Inspected>> {
    let mut all = Vec::new();
    for source in &config.sources {
        let name = config.catalogue.source(source.id).map_or_else(String::new, |s| s.name.clone());
        let role = if is_home(config, source.id) { Role::Home } else { Role::Source };
        let tables = config.catalogue.tables();
        let sharded: Vec<Table> = tables
            .filter(|table| table.sharding().is_some())
            .filter(|table| table.sources().len() > 1 && table.sources().contains(&source.id))
            .cloned()
            .collect();
        all.push(inspect_one(format!("source {name}"), source.endpoint.clone(), role, sharded));
        if let Some(replica) = source.replica.clone() {
            let own = format!("replica of {name} at {}", replica.address);
            all.push(inspect_one(own, replica, Role::Replica, Vec::new()));
        }
    }
    Box::pin(async move {
        let mut asked = JoinSet::new();
        for (place, one) in all.into_iter().enumerate() {
            asked.spawn(async move { (place, one.await) });
        }
        let mut found: Vec<(usize, Inspected)> = Vec::new();
        while let Some(one) = asked.join_next().await {
            found.extend(one.ok());
        }
        found.sort_by_key(|(place, _)| *place);
        found.into_iter().map(|(_, found)| found).collect()
    })
}

/// What a server is for the proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    Replica,
    Source,
    /// A source that shows the tables of the other sources, too.
    Home,
}

/// Whether a source shows the tables of others to clients of its kind.
fn is_home(config: &ProxyConfig, at: SourceId) -> bool {
    let kind = config.catalogue.source(at).map(|source| source.kind);
    let of_kind = |id: &SourceId| config.catalogue.source(*id).map(|source| source.kind) == kind;
    let first = || config.sources.iter().map(|source| source.id).find(of_kind);
    let home = config.new_tables.filter(of_kind).or_else(first);
    config.shows_all && config.sources.len() > 1 && home == Some(at)
}

async fn inspect_one(
    name: String,
    endpoint: Endpoint,
    role: Role,
    sharded: Vec<Table>,
) -> Inspected {
    let inspected = in_time(async {
        let mut session = Session::connect(&endpoint).await?;
        let (version, problems) = ask(&mut session, &endpoint, role).await?;
        let notes = keys(&mut session, &endpoint, &sharded).await?;
        Ok::<_, Trouble>(Inspected { name: name.clone(), version, problems, notes })
    });
    match inspected.await {
        Ok(inspected) => inspected,
        Err(trouble) => {
            let problem = format!(
                "{} cannot be reached: {trouble}; check `address`, `database`, `user` and the password",
                endpoint.address
            );
            let (version, notes) = (String::new(), Vec::new());
            Inspected { name, version, problems: vec![problem], notes }
        }
    }
}

/// Names the unique keys of sharded tables that the source can only check for its own rows.
async fn keys(
    session: &mut Session,
    endpoint: &Endpoint,
    sharded: &[Table],
) -> Result<Vec<String>, Trouble> {
    if sharded.is_empty() {
        return Ok(Vec::new());
    }
    let found = session.text(&questions(endpoint.kind), endpoint.one_way).await?.ok()?;
    let answers: Vec<Answer> = found.into_iter().map(|(answer, _)| answer).collect();
    let found = shapes(endpoint.kind, &answers);
    let mut notes = Vec::new();
    for table in sharded {
        let Some(column) = table.sharding().map(|sharding| &sharding.column) else { continue };
        let shape = found.values().find(|shape| shape.name.eq_ignore_ascii_case(&table.name));
        for key in shape.into_iter().flat_map(|shape| shape.keys_of_parts(column)) {
            notes.push(format!(
                "the unique key {} of table {} holds among the rows of this source only, because it does not \
                 contain {column}, by which the table is sharded; add that column to the key, or see to it that \
                 the application gives no value twice",
                key.name, table.name
            ));
        }
    }
    Ok(notes)
}

/// The server's version, and what is missing there.
async fn ask(
    session: &mut Session,
    endpoint: &Endpoint,
    role: Role,
) -> Result<(String, Vec<String>), Trouble> {
    let text = match endpoint.kind {
        Dialect::PostgreSql => POSTGRES,
        Dialect::MariaDb => MARIA,
    };
    let found = session.text(text, endpoint.one_way).await?.ok()?;
    let answer = found.into_iter().next().map(|(answer, _)| answer).unwrap_or_default();
    let version = format!("{} {}", endpoint.kind, cell(&answer, 0));
    if role == Role::Replica {
        return Ok((version, Vec::new()));
    }
    let is = |column: usize| matches!(&*cell(&answer, column), "t" | "1");
    let mut problems = Vec::new();
    let mut missing = |is_missing: bool, what: &str| {
        if is_missing {
            problems.push(what.to_owned());
        }
    };
    match endpoint.kind {
        Dialect::PostgreSql => {
            missing(!is(1), "the server is older than PostgreSQL 15; upgrade it");
            missing(
                !is(2),
                "max_prepared_transactions is 0; set it to the number of connections at least, and restart \
                 the server",
            );
            missing(
                !is(3) && !is(4),
                "the user may neither create tables nor use orthodrome_proxies; GRANT CREATE ON SCHEMA, or \
                 create the table and GRANT SELECT, INSERT, UPDATE on it",
            );
            missing(
                role == Role::Home && !is(5),
                "the user may not create a schema, so clients cannot see the tables of other sources in \
                 pg_catalog and information_schema; GRANT CREATE ON DATABASE, or set `catalogue = \"one\"`",
            );
        }
        Dialect::MariaDb => {
            missing(
                !is(1) && !is(2),
                "the tables orthodrome_proxies and orthodrome_branches do not exist, and the user may not \
                 create tables; GRANT CREATE, or create them",
            );
            missing(
                role == Role::Home && !is(3),
                "the user may not create databases, so clients cannot see the tables of other sources in \
                 information_schema and SHOW TABLES; GRANT ALL ON `orthodrome_catalogue_%`.*, or set \
                 `catalogue = \"one\"`",
            );
            let waits = session.text(MARIA_WAITS, endpoint.one_way).await?;
            missing(
                waits.fault.is_some(),
                "the user lacks the privilege PROCESS, so deadlocks across sources end by the lock time-out; \
                 GRANT PROCESS ON *.*",
            );
        }
    }
    Ok((version, problems))
}

fn cell(answer: &Answer, column: usize) -> String {
    let cell = answer.rows.first().and_then(|row| row.get(column)).cloned().flatten();
    String::from_utf8_lossy(&cell.unwrap_or_default()).into_owned()
}
