//! A server of a test's own: one that can be made to fail, or is no member of a set.

use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;

use backend_mongo::mongodb::Client;
use backend_mongo::mongodb::bson::Bson;
use backend_mongo::mongodb::bson::Document;
use backend_mongo::mongodb::bson::doc;
use backend_mongo::mongodb::options::ClientOptions;

use super::until;
use super::url;

/// A `mongod` in a folder of its own, both gone with it.
pub(crate) struct Server {
    process: Child,
    folder: PathBuf,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Server {
    /// A server of no set; `None` if MongoDB is excluded.
    pub(crate) async fn standalone() -> Option<Self> {
        url()?;
        Some(Self::start(&[]).await)
    }

    /// A set of one member, that fails when it is told; `None` if MongoDB is excluded.
    pub(crate) async fn failing() -> Option<Self> {
        url()?;
        let server = Self::start(&["--replSet", "rs1", "--setParameter", "enableTestCommands=1"]).await;
        server.initiate().await;
        Some(server)
    }

    /// A set of one member, that asks for passwords, with a user who may do everything: root, whose password is secret.
    /// `None` if MongoDB is excluded.
    pub(crate) async fn guarded() -> Option<Self> {
        url()?;
        let key = std::env::temp_dir().join(format!("fenced-key-{}", uuid::Uuid::new_v4().simple()));
        std::fs::write(&key, "only for this test").expect("writes");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("nobody else may read it");
        }
        let server = Self::start(&["--replSet", "rs1", "--keyFile", key.to_str().expect("UTF-8")]).await;
        std::fs::remove_file(&key).expect("is removed");
        server.initiate().await;
        // From the same machine the first user may be made by anybody.
        let user = doc! { "createUser": "root", "pwd": "secret", "roles": ["root"] };
        server.direct().await.database("admin").run_command(user).await.expect("is made");
        Some(server)
    }

    /// A set of one member, that takes encrypted connections only, with files of its certificate and its key, and of who vouches for
    /// it. `None` if MongoDB is excluded.
    pub(crate) async fn encrypted(certificate: &str, authority: &str) -> Option<Self> {
        url()?;
        let files = ["--tlsCertificateKeyFile", certificate, "--tlsCAFile", authority];
        let anybody = ["--tlsMode", "allowTLS", "--tlsAllowConnectionsWithoutCertificates", "--replSet", "rs1"];
        let server = Self::start(&[&anybody[..], &files].concat()).await;
        server.initiate().await;
        let admin = server.direct().await.database("admin");
        for mode in ["preferTLS", "requireTLS"] {
            admin.run_command(doc! { "setParameter": 1, "tlsMode": mode }).await.expect("is set");
        }
        Some(server)
    }

    async fn initiate(&self) {
        let admin = self.direct().await.database("admin");
        let member = doc! { "_id": 0, "host": format!("127.0.0.1:{}", self.port) };
        let set = doc! { "_id": "rs1", "members": [member] };
        admin.run_command(doc! { "replSetInitiate": set }).await.expect("is a set");
        until("the server is the primary", || async {
            let hello = admin.run_command(doc! { "hello": 1 }).await;
            hello.is_ok_and(|hello| hello.get_bool("isWritablePrimary") == Ok(true))
        })
        .await;
    }

    async fn start(arguments: &[&str]) -> Self {
        // Somebody else may get the port between its choice and the server's start.
        for _ in 0..5 {
            let mut server = Self::launch(arguments);
            let admin = server.direct().await.database("admin");
            while server.process.try_wait().expect("is a child").is_none() {
                if admin.run_command(doc! { "hello": 1 }).await.is_ok() {
                    return server;
                }
            }
        }
        panic!("the server ends at once, whatever its port");
    }

    fn launch(arguments: &[&str]) -> Self {
        let binary = std::env::var_os("TEST_MONGOD")
            .expect("TEST_MONGOD is not set: scripts/test.sh sets it to the path of the server's binary");
        let folder = std::env::temp_dir().join(format!("fenced-mongod-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let port =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr()).expect("a port").port();
        let process = Command::new(binary)
            .args(["--bind_ip", "127.0.0.1", "--wiredTigerCacheSizeGB", "0.25", "--port", &port.to_string()])
            .arg("--dbpath")
            .arg(&folder)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("starts");
        Self { process, folder, port }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("mongodb://127.0.0.1:{}/?directConnection=true", self.port)
    }

    /// A client that does not look for a primary.
    async fn direct(&self) -> Client {
        let mut options = ClientOptions::parse(self.url()).await.expect("a URL");
        options.server_selection_timeout = Some(Duration::from_millis(500));
        Client::with_options(options).expect("a client")
    }

    /// Has commands of this name fail, for one application's name.
    pub(crate) async fn fail(&self, mode: impl Into<Bson>, command: &str, how: Document) {
        let mut data = doc! { "failCommands": [command], "appName": "tested" };
        data.extend(how);
        let on = doc! { "configureFailPoint": "failCommand", "mode": mode.into(), "data": data };
        self.direct().await.database("admin").run_command(on).await.expect("fails from now on");
    }

    /// Has none fail any more.
    pub(crate) async fn works(&self) {
        let off = doc! { "configureFailPoint": "failCommand", "mode": "off" };
        self.direct().await.database("admin").run_command(off).await.expect("works again");
    }

    /// Has the only member be no primary for a second at least.
    pub(crate) async fn step_down(&self) {
        let command = doc! { "replSetStepDown": 1, "secondaryCatchUpPeriodSecs": 0, "force": true };
        self.direct().await.database("admin").run_command(command).await.expect("steps down");
    }

    /// What the server says of itself.
    pub(crate) async fn status(&self) -> Document {
        self.direct().await.database("admin").run_command(doc! { "serverStatus": 1 }).await.expect("a status")
    }
}
