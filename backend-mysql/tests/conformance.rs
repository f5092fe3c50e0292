//! The conformance suite on MySQL and MariaDB, and on a Galera cluster if there is one: on the backend's own connections, and on an
//! application's pool.

mod harness;

use std::process::ExitCode;

use harness::MysqlHarness;
use harness::Server;
use queue_conformance::Suite;

fn main() -> ExitCode {
    let mut suite = Suite::new();
    for server in [Server::all(), Server::clusters()].concat() {
        for pooled in [false, true] {
            suite = suite.harness(MysqlHarness { server, pooled });
        }
    }
    suite.run()
}
