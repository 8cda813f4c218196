// Triton's side of our models: a backend for `backend: "toolkit"`, in the place of Triton's own
// Python backend.
//
// A model's code is Python and runs in a process of its own, the worker (worker.py). This backend
// starts it and speaks with it over a socket. It hands requests over, and makes responses of what
// comes back. So a chunk costs the model a `write`, where Triton's Python backend builds objects in
// shared memory with the interpreter's lock held, and wakes a thread in each process, twice.
//
// It serves what our models need and no more: tensors on the CPU, any number of responses to a
// request, cancellation, metrics and logs. Requests are not batched, and models call no others.
//
// Threads of an instance: Triton's, which calls Execute and writes requests; the reader, which sends
// responses and never writes to the socket, so that neither side can wait for the other; and the
// watcher, which looks for requests whose clients have hung up, ends them for Triton, and gives back
// freed memory.
//
// If the worker dies, its open requests are answered with an error, and so are later ones. It is not
// started again and stays a zombie: that is how toolkit/process/supervise.py sees it.

#include "triton_api.h"

#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

extern char** environ;

namespace {

constexpr int kWorkerSocket = 3;  // the worker's file descriptor; wire.py has the same number
constexpr auto kWatchPeriod = std::chrono::milliseconds(20);
constexpr auto kStopTimeout = std::chrono::seconds(30);
// How long after the worker has ended a request whose client has hung up Triton hears of it.
constexpr auto kLetGoAfter = std::chrono::milliseconds(200);
constexpr size_t kReadBytes = 1 << 16;
constexpr uint32_t kMaxFrameBytes = 1u << 30;  // a longer frame is no frame of ours
// Blocks of this size and more are mapped, and go back to the system when they are freed. Left to
// itself, malloc keeps what large requests once took on its heaps, up to 32 MB each, where a small
// block behind it holds it for good: hostile prompts of 4 MB left 100 MiB in the server.
constexpr int kMappedBytes = 1 << 20;
// Large messages come in smaller pieces, too: what they leave free on a heap is given back so often.
constexpr auto kTrimPeriod = std::chrono::seconds(10);

// What the first byte of a frame says. wire.py has the same letters.
enum Kind : char {
  kInit = 'I', kRequest = 'R', kCancelled = 'C', kStop = 'S',
  kReady = 'A', kFailed = 'F', kResponse = 'P', kFamily = 'M', kMetric = 'N', kValue = 'V', kLog = 'L',
};
enum Content : uint8_t { kNothing = 0, kOutputs = 1, kError = 2 };
enum Change : uint8_t { kIncrement = 0, kSet = 1, kObserve = 2 };

// The message of an error of Triton's, which is freed. Empty: no error.
std::string message_of(TRITONSERVER_Error* error) {
  if (error == nullptr) return "";
  std::string message = TRITONSERVER_ErrorMessage(error);
  TRITONSERVER_ErrorDelete(error);
  return message;
}

void check(TRITONSERVER_Error* error) {
  if (error != nullptr) throw std::runtime_error(message_of(error));
}

void log(int level, const std::string& message) {
  message_of(TRITONSERVER_LogMessage(level, "toolkit", 0, message.c_str()));
}

uint64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

bool is_cancelled(TRITONBACKEND_ResponseFactory* factory) {
  bool is_cancelled = false;
  message_of(TRITONBACKEND_ResponseFactoryIsCancelled(factory, &is_cancelled));
  return is_cancelled;
}

// A frame that is being written: u32 length of the rest, kind, fields in the machine's byte order.
class Frame {
 public:
  explicit Frame(Kind kind) : bytes_(4, '\0') { bytes_.push_back(kind); }

  template <typename Number>
  Frame& number(Number value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Frame& text(const char* text, size_t size) {
    number<uint32_t>(size);
    bytes_.append(text, size);
    return *this;
  }
  Frame& text(const std::string& text) { return this->text(text.data(), text.size()); }
  Frame& raw(const void* bytes, size_t size) {
    bytes_.append(static_cast<const char*>(bytes), size);
    return *this;
  }
  const std::string& whole() {
    const uint32_t size = bytes_.size() - 4;
    std::memcpy(bytes_.data(), &size, 4);
    return bytes_;
  }

 private:
  std::string bytes_;
};

// Reads the fields of a frame. Throws if it ends too early, which would be a fault of ours.
class Fields {
 public:
  Fields(const char* begin, size_t size) : at_(begin), end_(begin + size) {}

  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, raw(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<uint32_t>();
    return std::string(raw(size), size);
  }
  const char* raw(size_t size) {
    if (size > static_cast<size_t>(end_ - at_)) throw std::runtime_error("a frame of the model's process ends early");
    const char* begin = at_;
    at_ += size;
    return begin;
  }

 private:
  const char* at_;
  const char* end_;
};

// One request that has not had its last response. `factory` belongs to the reader; the watcher asks it
// whether the request is cancelled, with `Instance::mutex_` held.
struct OpenRequest {
  TRITONBACKEND_ResponseFactory* factory = nullptr;
  std::shared_ptr<const std::vector<std::string>> outputs;  // that its client wants
  bool is_cancelled = false;         // and the worker knows it
  bool is_lost = false;              // its client hung up while a response was sent: see HungUp
};

// A request whose client has hung up, and which the worker has ended. Triton (24.10) frees twice what
// its gRPC front end holds of such a request, and dies of it, in two cases (HandleCancellation and
// StateWriteResponse, src/grpc of the server). If it hears of the end while gRPC has not given back a
// response before it: so it hears of it later, kLetGoAfter. And if the client hung up while a response
// was being sent: the end of such a request it never hears, and keeps it. That is 1 to 3 %.
struct HungUp {
  TRITONBACKEND_ResponseFactory* factory;
  std::chrono::steady_clock::time_point since;
};

class Instance {
 public:
  explicit Instance(TRITONBACKEND_ModelInstance* instance) : instance_(instance) { start(); }
  ~Instance() { stop(); }
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  void execute(TRITONBACKEND_Request* request);

 private:
  void start();
  void spawn(int socket, const std::string& folder);
  void wait_until_ready();
  void stop();
  bool write(Frame& frame);
  bool read_frame(std::string& frame);
  void read();
  void watch();
  void handle(const std::string& frame);
  void respond(Fields& fields);
  void add_family(Fields& fields);
  void add_metric(Fields& fields);
  void change_metric(Fields& fields);
  void end_unheard(const OpenRequest& request);
  void let_go(std::chrono::steady_clock::time_point before);
  void fail_open_requests();
  std::string how_it_ended() const;

  TRITONBACKEND_ModelInstance* instance_;
  pid_t pid_ = -1;
  int socket_ = -1;
  std::vector<char> buffer_;
  size_t position_ = 0, filled_ = 0;  // of the buffer: what was taken, and what was received
  std::mutex writing_;
  std::mutex mutex_;  // of open_, hung_up_ and is_gone_
  std::condition_variable stopped_;
  std::unordered_map<uint64_t, OpenRequest> open_;
  std::deque<HungUp> hung_up_;
  bool is_gone_ = false;  // the worker answers no more
  bool is_stopping_ = false;
  uint64_t last_number_ = 0;
  std::map<uint32_t, TRITONSERVER_MetricFamily*> families_;
  std::map<uint32_t, TRITONSERVER_Metric*> metrics_;
  std::thread reader_, watcher_;
};

// The worker: started, and ended.

void Instance::start() {
  TRITONBACKEND_Model* model;
  check(TRITONBACKEND_ModelInstanceModel(instance_, &model));
  TRITONBACKEND_ArtifactType type;
  const char* stated;
  check(TRITONBACKEND_ModelRepository(model, &type, &stated));
  const std::string location = std::filesystem::absolute(stated);  // the worker runs elsewhere
  uint64_t version;
  check(TRITONBACKEND_ModelVersion(model, &version));
  TRITONSERVER_Message* message;
  check(TRITONBACKEND_ModelConfig(model, 1, &message));
  const char* json;
  size_t size;
  check(TRITONSERVER_MessageSerializeToJson(message, &json, &size));
  const std::string config(json, size);
  check(TRITONSERVER_MessageDelete(message));

  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
    throw std::runtime_error(std::string("no socket for the model's process: ") + std::strerror(errno));
  socket_ = sockets[0];
  const std::string folder = location + "/" + std::to_string(version);
  try {
    spawn(sockets[1], folder);
  } catch (...) {
    close(sockets[0]);
    close(sockets[1]);
    throw;
  }
  close(sockets[1]);
  Frame init(kInit);
  init.text(location).text(std::to_string(version)).text(config);
  write(init);
  try {
    wait_until_ready();
  } catch (...) {
    stop();
    throw;
  }
  reader_ = std::thread(&Instance::read, this);
  watcher_ = std::thread(&Instance::watch, this);
}

// Run the worker in the model's version folder, where no folder can hide an installed module. Its
// Python is the first on PATH, as for Triton's Python backend. It inherits the environment, but for
// the server's own libraries.
void Instance::spawn(int socket, const std::string& folder) {
  std::vector<std::string> environment;
  const char* libraries = std::getenv("TOOLKIT_WORKER_LIBRARY_PATH");
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (libraries == nullptr || std::strncmp(*entry, "LD_LIBRARY_PATH=", 16) != 0) environment.push_back(*entry);
  if (libraries != nullptr && *libraries != '\0') environment.push_back(std::string("LD_LIBRARY_PATH=") + libraries);
  std::vector<char*> envp;
  for (auto& entry : environment) envp.push_back(entry.data());
  envp.push_back(nullptr);
  const char* code = "from toolkit.triton.native.worker import main; main()";
  const char* argv[] = {"python3", "-c", code, folder.c_str(), nullptr};

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, socket, kWorkerSocket);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t signals;
  sigemptyset(&signals);
  posix_spawnattr_setsigmask(&attributes, &signals);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  const int failure = posix_spawnp(&pid_, "python3", &actions, &attributes, const_cast<char* const*>(argv), envp.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failure != 0) {
    pid_ = -1;
    throw std::runtime_error(std::string("python3, which runs the model, could not be started: ") + std::strerror(failure));
  }
}

void Instance::wait_until_ready() {
  std::string frame;
  while (read_frame(frame)) {
    if (frame[0] == kReady) return;
    if (frame[0] == kFailed) throw std::runtime_error(Fields(frame.data() + 1, frame.size() - 1).text());
    handle(frame);
  }
  throw std::runtime_error(
      "the model's process " + how_it_ended() +
      " before it was ready; the log says why. It runs the first python3 on the PATH, which needs the toolkit"
      " installed: launch with the repository's launch.sh");
}

// Let the worker finish, wait for it, and free everything. The reader ends with the connection.
void Instance::stop() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  stopped_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  Frame frame(kStop);
  write(frame);
  const auto deadline = std::chrono::steady_clock::now() + kStopTimeout;
  while (pid_ > 0) {
    const pid_t ended = waitpid(pid_, nullptr, WNOHANG);
    if (ended == pid_ || (ended < 0 && errno != EINTR)) pid_ = -1;
    else if (std::chrono::steady_clock::now() > deadline) kill(pid_, SIGKILL);
    if (pid_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  shutdown(socket_, SHUT_RDWR);
  if (reader_.joinable()) reader_.join();
  let_go(std::chrono::steady_clock::time_point::max());
  close(socket_);
  for (auto& [id, metric] : metrics_) message_of(TRITONSERVER_MetricDelete(metric));
  for (auto& [id, family] : families_) message_of(TRITONSERVER_MetricFamilyDelete(family));
}

std::string Instance::how_it_ended() const {
  siginfo_t info{};
  // The connection may end a moment before the process does.
  for (int attempt = 0; attempt < 100; ++attempt) {
    if (waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_) {
      const bool is_exit = info.si_code == CLD_EXITED;
      return (is_exit ? "ended with exit code " : "was killed by signal ") + std::to_string(info.si_status);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return "closed its connection";
}

// The connection.

bool Instance::write(Frame& frame) {
  const std::string& bytes = frame.whole();
  std::lock_guard lock(writing_);
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t sent = send(socket_, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (sent > 0) done += sent;
    else if (errno != EINTR) return false;
  }
  return true;
}

// The next frame, without its length. False when the connection has ended.
bool Instance::read_frame(std::string& frame) {
  for (;;) {
    const size_t there = filled_ - position_;
    if (there >= 4) {
      uint32_t size;
      std::memcpy(&size, buffer_.data() + position_, 4);
      if (size == 0 || size > kMaxFrameBytes) return false;
      if (there >= 4 + static_cast<size_t>(size)) {
        frame.assign(buffer_.data() + position_ + 4, size);
        position_ += 4 + static_cast<size_t>(size);
        return true;
      }
    }
    std::memmove(buffer_.data(), buffer_.data() + position_, there);
    position_ = 0;
    filled_ = there;
    // Grown for a long frame, and only then: to fill it with zeros takes longer than what is read.
    if (buffer_.size() < filled_ + kReadBytes) buffer_.resize(filled_ + kReadBytes);
    ssize_t received;
    do received = recv(socket_, buffer_.data() + filled_, buffer_.size() - filled_, 0);
    while (received < 0 && errno == EINTR);
    if (received <= 0) return false;
    filled_ += received;
  }
}

void Instance::read() {
  std::string frame;
  try {
    while (read_frame(frame)) handle(frame);
  } catch (const std::exception& error) {
    log(TRITONSERVER_LOG_ERROR, error.what());
  }
  fail_open_requests();
}

void Instance::watch() {
  auto trimmed = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  while (!stopped_.wait_for(lock, kWatchPeriod, [this] { return is_stopping_ || (is_gone_ && hung_up_.empty()); })) {
    std::vector<uint64_t> cancelled;
    for (auto& [number, request] : open_) {
      if (request.is_cancelled || !is_cancelled(request.factory)) continue;
      request.is_cancelled = true;
      cancelled.push_back(number);
    }
    lock.unlock();
    let_go(std::chrono::steady_clock::now() - kLetGoAfter);
    for (const uint64_t number : cancelled) {
      Frame frame(kCancelled);
      frame.number(number);
      write(frame);
    }
    if (const auto now = std::chrono::steady_clock::now(); now - trimmed > kTrimPeriod) {
      malloc_trim(0);
      trimmed = now;
    }
    lock.lock();
  }
}

// End a request whose client has hung up. With mutex_ held.
void Instance::end_unheard(const OpenRequest& request) {
  if (request.is_lost) message_of(TRITONBACKEND_ResponseFactoryDelete(request.factory));
  else hung_up_.push_back({request.factory, std::chrono::steady_clock::now()});
}

// Tell Triton of the ends of requests whose clients have hung up, but for the latest.
void Instance::let_go(std::chrono::steady_clock::time_point before) {
  std::vector<TRITONBACKEND_ResponseFactory*> factories;
  {
    std::lock_guard lock(mutex_);
    for (; !hung_up_.empty() && hung_up_.front().since <= before; hung_up_.pop_front()) factories.push_back(hung_up_.front().factory);
  }
  for (auto* factory : factories) {
    message_of(TRITONBACKEND_ResponseFactorySendFlags(factory, TRITONSERVER_RESPONSE_COMPLETE_FINAL));
    message_of(TRITONBACKEND_ResponseFactoryDelete(factory));
  }
}

void Instance::handle(const std::string& frame) {
  Fields fields(frame.data() + 1, frame.size() - 1);
  switch (frame[0]) {
    case kResponse: return respond(fields);
    case kFamily: return add_family(fields);
    case kMetric: return add_metric(fields);
    case kValue: return change_metric(fields);
    case kLog: {
      const auto level = fields.number<uint8_t>();
      return log(level, fields.text());
    }
    default: throw std::runtime_error("unknown frame of the model's process");
  }
}

// Requests and responses.

void write_input(Frame& frame, TRITONBACKEND_Input* input) {
  const char* name;
  TRITONSERVER_DataType type;
  const int64_t* shape;
  uint32_t dims, buffers;
  uint64_t size;
  check(TRITONBACKEND_InputProperties(input, &name, &type, &shape, &dims, &size, &buffers));
  const size_t name_size = std::strlen(name);
  frame.number<uint32_t>(4 + name_size + 8 + 8 * dims);  // the size of the head
  frame.text(name, name_size).number<uint32_t>(type).number<uint32_t>(dims);
  for (uint32_t i = 0; i < dims; ++i) frame.number<int64_t>(shape[i]);
  if (size > kMaxFrameBytes) throw std::runtime_error(std::string(name) + " is larger than 1 GiB");
  frame.number<uint32_t>(size);
  for (uint32_t i = 0; i < buffers; ++i) {
    const void* buffer;
    uint64_t part;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    check(TRITONBACKEND_InputBuffer(input, i, &buffer, &part, &memory, &memory_id));
    if (memory != TRITONSERVER_MEMORY_CPU && memory != 1)  // 1: pinned memory of the host
      throw std::runtime_error(std::string(name) + " is on a GPU; tensors have to be in the memory of the host");
    frame.raw(buffer, part);
  }
}

void write_parameter(Frame& frame, const char* name, TRITONSERVER_ParameterType type, const void* value) {
  frame.text(name, std::strlen(name)).number<uint8_t>(type);
  const auto* text = static_cast<const char*>(value);
  switch (type) {
    case TRITONSERVER_PARAMETER_STRING: frame.text(text, std::strlen(text)); break;
    case TRITONSERVER_PARAMETER_INT: frame.number(*static_cast<const int64_t*>(value)); break;
    case TRITONSERVER_PARAMETER_BOOL: frame.number<uint8_t>(*static_cast<const bool*>(value)); break;
    case TRITONSERVER_PARAMETER_DOUBLE: frame.number(*static_cast<const double*>(value)); break;
    default: throw std::runtime_error(std::string("parameter ") + name + " has a type that no model reads");
  }
}

void write_request(Frame& frame, TRITONBACKEND_Request* request) {
  const char* id;
  check(TRITONBACKEND_RequestId(request, &id));
  frame.text(id, std::strlen(id));
  uint32_t count;
  check(TRITONBACKEND_RequestParameterCount(request, &count));
  frame.number(count);
  for (uint32_t i = 0; i < count; ++i) {
    const char* name;
    TRITONSERVER_ParameterType type;
    const void* value;
    check(TRITONBACKEND_RequestParameter(request, i, &name, &type, &value));
    write_parameter(frame, name, type, value);
  }
  check(TRITONBACKEND_RequestInputCount(request, &count));
  frame.number(count);
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input;
    check(TRITONBACKEND_RequestInputByIndex(request, i, &input));
    write_input(frame, input);
  }
}

std::vector<std::string> wanted_outputs(TRITONBACKEND_Request* request) {
  uint32_t count;
  check(TRITONBACKEND_RequestOutputCount(request, &count));
  std::vector<std::string> names;
  for (uint32_t i = 0; i < count; ++i) {
    const char* name;
    check(TRITONBACKEND_RequestOutputName(request, i, &name));
    names.emplace_back(name);
  }
  return names;
}

void send_error(TRITONBACKEND_ResponseFactory* factory, int code, const std::string& text) {
  TRITONBACKEND_Response* response;
  check(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  TRITONSERVER_Error* error = TRITONSERVER_ErrorNew(code, text.c_str());
  const std::string failure = message_of(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
  TRITONSERVER_ErrorDelete(error);
  if (!failure.empty()) log(TRITONSERVER_LOG_ERROR, failure);
}

// Hand a request to the worker. Triton's object is freed at once; its responses go through the
// factory.
void Instance::execute(TRITONBACKEND_Request* request) {
  const uint64_t started_ns = now_ns();
  OpenRequest open;
  std::string failure;
  uint64_t number = 0;
  try {
    check(TRITONBACKEND_ResponseFactoryNew(&open.factory, request));
    open.outputs = std::make_shared<const std::vector<std::string>>(wanted_outputs(request));
    Frame frame(kRequest);
    number = ++last_number_;
    frame.number(number);
    write_request(frame, request);
    bool is_gone;
    {
      std::lock_guard lock(mutex_);
      is_gone = is_gone_;
      if (!is_gone) open_.emplace(number, open);
    }
    if (is_gone) failure = "[error] the model's process has died";
    // What cannot be written is answered by the reader, when it sees the connection end.
    else write(frame);
  } catch (const std::exception& error) {
    failure = std::string("[error] ") + error.what();
  }
  if (!failure.empty() && open.factory != nullptr) {
    try {
      send_error(open.factory, TRITONSERVER_ERROR_UNAVAILABLE, failure);
    } catch (const std::exception& error) {
      log(TRITONSERVER_LOG_ERROR, error.what());
    }
    message_of(TRITONBACKEND_ResponseFactoryDelete(open.factory));
  }
  const uint64_t ended_ns = now_ns();
  message_of(TRITONBACKEND_ModelInstanceReportStatistics(instance_, request, failure.empty(), started_ns, started_ns, ended_ns, ended_ns));
  message_of(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance_, 1, started_ns, started_ns, ended_ns, ended_ns));
  message_of(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL));
}

void add_output(TRITONBACKEND_Response* response, Fields& fields, const std::vector<std::string>& wanted) {
  fields.number<uint32_t>();  // the size of the head
  const std::string name = fields.text();
  const auto type = fields.number<uint32_t>();
  std::vector<int64_t> shape(fields.number<uint32_t>());
  for (auto& dim : shape) dim = fields.number<int64_t>();
  const auto size = fields.number<uint32_t>();
  const char* content = fields.raw(size);
  if (std::find(wanted.begin(), wanted.end(), name) == wanted.end()) return;
  TRITONBACKEND_Output* output;
  check(TRITONBACKEND_ResponseOutput(response, &output, name.c_str(), type, shape.data(), shape.size()));
  void* buffer;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  check(TRITONBACKEND_OutputBuffer(output, &buffer, size, &memory, &memory_id));
  if (memory != TRITONSERVER_MEMORY_CPU && memory != 1) throw std::runtime_error("no buffer of the host for " + name);
  std::memcpy(buffer, content, size);
}

// A response of the worker. After the last one the request is over, and the worker names it no more.
// A client that has hung up gets none.
void Instance::respond(Fields& fields) {
  const auto number = fields.number<uint64_t>();
  const auto flags = fields.number<uint8_t>();
  const bool is_last = (flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL) != 0;
  OpenRequest request;
  bool is_lost = false;
  {
    std::lock_guard lock(mutex_);
    const auto found = open_.find(number);
    if (found == open_.end()) throw std::runtime_error("a response to a request that is not open");
    request.factory = found->second.factory;
    const bool has_hung_up = is_cancelled(request.factory);
    if (has_hung_up && is_last) {
      end_unheard(found->second);
      open_.erase(found);
    }
    if (has_hung_up) return;
    request.outputs = found->second.outputs;
    if (is_last) open_.erase(found);
  }
  try {
    const auto content = fields.number<uint8_t>();
    if (content == kError) {
      const auto code = fields.number<uint32_t>();
      send_error(request.factory, code, fields.text());
    } else if (content == kNothing) {
      check(TRITONBACKEND_ResponseFactorySendFlags(request.factory, flags));
    } else {
      TRITONBACKEND_Response* response;
      check(TRITONBACKEND_ResponseNewFromFactory(&response, request.factory));
      TRITONSERVER_Error* error = nullptr;
      try {
        for (auto outputs = fields.number<uint32_t>(); outputs > 0; --outputs) add_output(response, fields, *request.outputs);
      } catch (const std::exception& failure) {
        error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, failure.what());
      }
      const bool had_hung_up = is_cancelled(request.factory);  // then Triton drops the response
      const std::string failure = message_of(TRITONBACKEND_ResponseSend(response, flags, error));
      is_lost = !had_hung_up && is_cancelled(request.factory);
      if (error != nullptr) TRITONSERVER_ErrorDelete(error);
      if (!failure.empty()) log(TRITONSERVER_LOG_ERROR, failure);
    }
  } catch (const std::exception& error) {
    log(TRITONSERVER_LOG_ERROR, error.what());
  }
  if (is_last) {
    message_of(TRITONBACKEND_ResponseFactoryDelete(request.factory));
  } else if (is_lost) {
    std::lock_guard lock(mutex_);
    if (const auto found = open_.find(number); found != open_.end()) found->second.is_lost = true;
  }
}

void Instance::fail_open_requests() {
  std::unordered_map<uint64_t, OpenRequest> open;
  bool is_stopping;
  {
    std::lock_guard lock(mutex_);
    is_gone_ = true;
    is_stopping = is_stopping_;
    open.swap(open_);
    for (auto each = open.begin(); each != open.end();) {
      const bool has_hung_up = is_cancelled(each->second.factory);
      if (has_hung_up) end_unheard(each->second);
      each = has_hung_up ? open.erase(each) : std::next(each);
    }
  }
  stopped_.notify_all();
  const std::string reason = is_stopping ? "the server is stopping" : "the model's process " + how_it_ended();
  if (!is_stopping) log(TRITONSERVER_LOG_ERROR, reason);
  for (auto& [number, request] : open) {
    try {
      send_error(request.factory, TRITONSERVER_ERROR_UNAVAILABLE, "[error] " + reason);
    } catch (const std::exception& error) {
      log(TRITONSERVER_LOG_ERROR, error.what());
    }
    message_of(TRITONBACKEND_ResponseFactoryDelete(request.factory));
  }
}

// Metrics. The worker numbers its families and metrics.

void Instance::add_family(Fields& fields) {
  const auto id = fields.number<uint32_t>();
  const auto kind = fields.number<uint8_t>();
  const std::string name = fields.text(), description = fields.text();
  TRITONSERVER_MetricFamily* family = nullptr;
  const std::string failure = message_of(TRITONSERVER_MetricFamilyNew(&family, kind, name.c_str(), description.c_str()));
  if (failure.empty()) families_[id] = family;
  else log(TRITONSERVER_LOG_WARN, name + ": " + failure);
}

void Instance::add_metric(Fields& fields) {
  const auto id = fields.number<uint32_t>();
  const auto family = families_.find(fields.number<uint32_t>());
  std::vector<const TRITONSERVER_Parameter*> labels;
  for (auto count = fields.number<uint32_t>(); count > 0; --count) {
    const std::string name = fields.text(), value = fields.text();
    labels.push_back(TRITONSERVER_ParameterNew(name.c_str(), TRITONSERVER_PARAMETER_STRING, value.c_str()));
  }
  std::vector<double> buckets(fields.number<uint32_t>());
  for (auto& limit : buckets) limit = fields.number<double>();
  if (family != families_.end()) {
    TRITONSERVER_Metric* metric = nullptr;
    std::string failure;
    if (buckets.empty()) {
      failure = message_of(TRITONSERVER_MetricNew(&metric, family->second, labels.data(), labels.size()));
    } else {
      TRITONSERVER_MetricArgs* args = nullptr;
      check(TRITONSERVER_MetricArgsNew(&args));
      check(TRITONSERVER_MetricArgsSetHistogram(args, buckets.data(), buckets.size()));
      failure = message_of(TRITONSERVER_MetricNewWithArgs(&metric, family->second, labels.data(), labels.size(), args));
      message_of(TRITONSERVER_MetricArgsDelete(args));
    }
    if (failure.empty()) metrics_[id] = metric;
    else log(TRITONSERVER_LOG_WARN, failure);
  }
  for (const auto* label : labels) TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(label));
}

void Instance::change_metric(Fields& fields) {
  const auto metric = metrics_.find(fields.number<uint32_t>());
  const auto change = fields.number<uint8_t>();
  const auto value = fields.number<double>();
  if (metric == metrics_.end()) return;  // it could not be made, which the log says
  TRITONSERVER_Error* error = nullptr;
  if (change == kIncrement) error = TRITONSERVER_MetricIncrement(metric->second, value);
  else if (change == kSet) error = TRITONSERVER_MetricSet(metric->second, value);
  else error = TRITONSERVER_MetricObserve(metric->second, value);
  const std::string failure = message_of(error);
  if (!failure.empty()) log(TRITONSERVER_LOG_WARN, failure);
}

}  // namespace

// What Triton calls.

extern "C" {

__attribute__((visibility("default"))) TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*) {
  mallopt(M_MMAP_THRESHOLD, kMappedBytes);
  uint32_t major, minor;
  TRITONSERVER_Error* error = TRITONBACKEND_ApiVersion(&major, &minor);
  if (error == nullptr && major != 1)
    error = TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNSUPPORTED, "this server's interface for backends is not version 1: package with triton.backend: python");
  return error;
}

__attribute__((visibility("default"))) TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  try {
    return TRITONBACKEND_ModelInstanceSetState(instance, new Instance(instance));
  } catch (const std::exception& error) {
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, error.what());
  }
}

__attribute__((visibility("default"))) TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  void* state;
  TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &state);
  if (error == nullptr) delete static_cast<Instance*>(state);
  return error;
}

__attribute__((visibility("default"))) TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  void* state;
  TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &state);
  if (error != nullptr) return error;
  for (uint32_t i = 0; i < count; ++i) static_cast<Instance*>(state)->execute(requests[i]);
  return nullptr;
}

}  // extern "C"
