// openai of npm against a server: chats, streams, tools by chat completions and Responses, typed answers, and errors.
import assert from 'node:assert/strict'
import OpenAI from 'openai'
import { ANSWER, DESCRIPTION, PLACE, QUESTION, SCHEMA, checkCalled, checkPlace, getWeather } from './weather.mjs'

const [url, key, mode] = process.argv.slice(2)
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 300_000 })
const hello = [{ role: 'user', content: 'Hello.' }]
const model = 'model'

async function checkChat() {
  const whole = await client.chat.completions.create({ model, messages: hello, temperature: 0, max_tokens: 24 })
  const text = whole.choices[0].message.content
  assert.ok(text)
  if (mode === 'replayed') assert.equal(text, 'Hello, how are you?')
  const stream = await client.chat.completions.create({
    model, messages: hello, temperature: 0, max_tokens: 24, stream: true, stream_options: { include_usage: true },
  })
  let streamed = ''
  let usage
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta.content ?? ''
    usage = chunk.usage ?? usage
  }
  assert.equal(streamed, text)
  assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens)
}

// Let the model call the tool, send its message back as it came, and let it answer.
async function checkTools(streamed) {
  const messages = [{ role: 'user', content: QUESTION }]
  const tools = [{ type: 'function', function: { name: 'get_weather', description: DESCRIPTION, parameters: SCHEMA } }]
  const given = { model, messages, tools, max_tokens: 200 }
  const first = { ...given, tool_choice: 'required', parallel_tool_calls: false }
  const answer = streamed
    ? await client.chat.completions.stream(first).finalChatCompletion()
    : await client.chat.completions.create(first)
  const { message, finish_reason } = answer.choices[0]
  assert.equal(finish_reason, 'tool_calls')
  const [call] = message.tool_calls
  messages.push(message)
  messages.push({ role: 'tool', tool_call_id: call.id, content: getWeather(JSON.parse(call.function.arguments)) })
  checkCalled(mode)
  const final = await client.chat.completions.create(given)
  if (mode === 'replayed') {
    assert.equal(final.choices[0].message.content, ANSWER)
    assert.equal(final.choices[0].message.tool_calls?.length ?? 0, 0)
  }
}

// The package's own loop: it parses the arguments, calls the function and sends the messages back.
async function checkRunner(stream) {
  const runner = client.chat.completions.runTools({
    model,
    stream,
    messages: [{ role: 'user', content: QUESTION }],
    tools: [{
      type: 'function',
      function: {
        name: 'get_weather', description: DESCRIPTION, parameters: SCHEMA, parse: JSON.parse, function: getWeather,
      },
    }],
  })
  assert.equal(await runner.finalContent(), ANSWER)
  checkCalled(mode)
}

async function checkResponses() {
  const tools = [{ type: 'function', name: 'get_weather', description: DESCRIPTION, parameters: SCHEMA, strict: true }]
  const input = [{ role: 'user', content: QUESTION }]
  const stream = client.responses.stream({
    model, input, tools, tool_choice: 'required', parallel_tool_calls: false, max_output_tokens: 200,
  })
  const kinds = new Set()
  for await (const event of stream) kinds.add(event.type)
  for (const kind of ['response.created', 'response.function_call_arguments.done', 'response.completed']) {
    assert.ok(kinds.has(kind), `no ${kind} in ${[...kinds]}`)
  }
  const response = await stream.finalResponse()
  const call = response.output.find((item) => item.type === 'function_call')
  const output = getWeather(JSON.parse(call.arguments))
  checkCalled(mode)
  const final = await client.responses.create({
    model, tools, max_output_tokens: 60,
    input: [...input, ...response.output, { type: 'function_call_output', call_id: call.call_id, output }],
  })
  const linked = await client.responses.create({
    model, tools, max_output_tokens: 60, previous_response_id: response.id,
    input: [{ type: 'function_call_output', call_id: call.call_id, output }],
  })
  if (mode === 'replayed') assert.deepEqual([final.output_text, linked.output_text], [ANSWER, ANSWER])
}

async function checkParse() {
  const answer = await client.chat.completions.parse({
    model,
    messages: [{ role: 'user', content: 'Describe a town as JSON.' }],
    response_format: { type: 'json_schema', json_schema: { name: 'town', schema: PLACE, strict: true } },
    max_tokens: 400,
  })
  checkPlace(JSON.parse(answer.choices[0].message.content), mode)
}

async function checkErrors() {
  const chat = (given) => client.chat.completions.create({ model, messages: hello, ...given })
  await assert.rejects(chat({ temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError, error)
    assert.equal(error.param, 'temperature')
    return true
  })
  await assert.rejects(chat({ model: 'other' }), OpenAI.NotFoundError)
  await assert.rejects(chat({ model: 'other', stream: true }), OpenAI.NotFoundError)
  const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'wrong', maxRetries: 0 })
  await assert.rejects(async () => await stranger.models.list(), OpenAI.AuthenticationError)
}

async function checkLists() {
  const ids = []
  for await (const each of client.models.list()) ids.push(each.id)
  assert.deepEqual(ids, [model])
}

await checkLists()
await checkChat()
for (const streamed of [false, true]) await checkTools(streamed)
if (mode === 'replayed') for (const streamed of [false, true]) await checkRunner(streamed)
await checkResponses()
await checkParse()
await checkErrors()
