//! The baseline for the exchange: frames of the same sizes over mutual TLS of the same kind,
//! answered as they come by a server that does nothing else.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::certificates::Certificates;
use crate::sizes::Exchange;

/// The bytes of a request, which state the length of the answer.
const ANSWER: usize = 4;

/// A frame's length and its bytes.
async fn read(stream: &mut (impl AsyncReadExt + Unpin), into: &mut Vec<u8>) -> io::Result<()> {
    let length = stream.read_u32().await?;
    into.resize(length as usize, 0);
    stream.read_exact(into).await.map(drop)
}

async fn write(stream: &mut (impl AsyncWriteExt + Unpin), bytes: &mut [u8]) -> io::Result<()> {
    let length = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&length.to_be_bytes());
    stream.write_all(bytes).await?;
    stream.flush().await
}

/// Starts the server on the current runtime; it runs as long as that.
pub async fn serve(certificates: &Certificates) -> SocketAddr {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let roots = Arc::new(roots(certificates));
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
    let (chain, key) = certificates.server();
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_client_cert_verifier(verifier.expect("a verifier"))
        .with_single_cert(chain, key)
        .expect("the server's certificate");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its number");
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a connection");
            tokio::spawn(answer(acceptor.clone(), stream)); // ends with the connection
        }
    });
    address
}

async fn answer(acceptor: TlsAcceptor, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = acceptor.accept(stream).await?;
    let (mut request, mut reply) = (Vec::new(), Vec::new());
    loop {
        read(&mut stream, &mut request).await?;
        let size = request.first_chunk::<ANSWER>().expect("a size");
        reply.resize(4 + u32::from_be_bytes(*size) as usize, 7);
        write(&mut stream, &mut reply).await?;
    }
}

/// An open connection.
pub struct Client {
    stream: tokio_rustls::client::TlsStream<TcpStream>,
    request: Vec<u8>,
    reply: Vec<u8>,
}

impl Client {
    pub async fn connect(address: SocketAddr, certificates: &Certificates) -> Self {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let (chain, key) = certificates.client();
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_root_certificates(roots(certificates))
            .with_client_auth_cert(chain, key)
            .expect("the client's certificate");
        let stream = TcpStream::connect(address).await.expect("a connection");
        stream.set_nodelay(true).expect("no delay");
        let name = ServerName::try_from("127.0.0.1").expect("a name");
        let stream = TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await;
        Self {
            stream: stream.expect("a handshake"),
            request: Vec::new(),
            reply: Vec::new(),
        }
    }

    /// A request and its reply.
    pub async fn ping(&mut self, Exchange { ask, answer }: Exchange) {
        self.request.resize(4 + ask.max(ANSWER), 7);
        self.request[4..][..ANSWER].copy_from_slice(&(answer as u32).to_be_bytes());
        write(&mut self.stream, &mut self.request)
            .await
            .expect("a request sent");
        read(&mut self.stream, &mut self.reply)
            .await
            .expect("a reply");
        assert_eq!(self.reply.len(), answer);
    }
}

fn roots(certificates: &Certificates) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(certificates.authority()).expect("the authority");
    roots
}
